# SPDX-License-Identifier: Apache-2.0
"""How a process begins, forks and ends."""
