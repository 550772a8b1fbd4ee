# SPDX-License-Identifier: Apache-2.0
"""Windows for operators: lists, verifies, deletes and exports them."""
