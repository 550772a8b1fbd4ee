# SPDX-License-Identifier: Apache-2.0
"""Checkpointing strategies: when which state is captured, and the source of a recovery."""
