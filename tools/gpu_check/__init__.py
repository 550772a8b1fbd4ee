# SPDX-License-Identifier: Apache-2.0
"""Checks on one GPU what tests on a CPU cannot show: copies, NCCL after a death, whole jobs."""
