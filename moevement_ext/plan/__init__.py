# SPDX-License-Identifier: Apache-2.0
"""Planning: which operator is captured in full in which iteration of the window."""
