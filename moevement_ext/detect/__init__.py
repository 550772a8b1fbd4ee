# SPDX-License-Identifier: Apache-2.0
"""Notices failures and wakes up who waits for the dead."""
