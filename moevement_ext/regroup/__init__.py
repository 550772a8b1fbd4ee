# SPDX-License-Identifier: Apache-2.0
"""Unblocks torch process groups after a fault and reconnects them in place."""
