# SPDX-License-Identifier: Apache-2.0
"""Before a long run: checks that all nodes of the allocation are alike."""
