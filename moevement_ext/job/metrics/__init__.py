# SPDX-License-Identifier: Apache-2.0
"""Metrics for operators of a cluster: cost and lag of protection, and recoveries."""
