# SPDX-License-Identifier: Apache-2.0
"""Exports windows in one process on a CPU: a model of one rank, filled and saved by upstream."""
