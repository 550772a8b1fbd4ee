# SPDX-License-Identifier: Apache-2.0
"""Sparse checkpointing for Megatron: the adapter between upstream and the engine."""
