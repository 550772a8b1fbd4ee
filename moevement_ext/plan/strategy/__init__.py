# SPDX-License-Identifier: Apache-2.0
"""Checkpointing strategies: what is captured when, and what a failure is recovered from."""
