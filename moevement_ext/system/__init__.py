# SPDX-License-Identifier: Apache-2.0
"""Node-level facilities: processes, signals, and GPU faults before a collective hangs."""
