# SPDX-License-Identifier: Apache-2.0
"""Notices GPUs that are about to fail, or have, before a collective hangs on them."""
