# SPDX-License-Identifier: Apache-2.0
"""Checkpointing strategies: which state is captured when, and where a recovery starts from."""
