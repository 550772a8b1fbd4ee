# SPDX-License-Identifier: Apache-2.0
"""Checks on one GPU what has only run without: copies, NCCL after a death, whole jobs."""
