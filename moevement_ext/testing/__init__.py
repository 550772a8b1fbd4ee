# SPDX-License-Identifier: Apache-2.0
"""Fault injection for tests and demonstrations."""
