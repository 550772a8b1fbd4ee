# SPDX-License-Identifier: Apache-2.0
"""Before a long run: does every node of the allocation do what the others do?"""
