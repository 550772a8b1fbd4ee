# SPDX-License-Identifier: Apache-2.0
"""Errors a user can act on; each message says what was wrong and what to do."""


class SparseCheckpointError(RuntimeError):
    """Base of all errors raised by sparse checkpointing."""
