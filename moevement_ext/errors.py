# SPDX-License-Identifier: Apache-2.0
"""Errors a user can act on; each message says what was wrong and what to do."""

EXIT_WHOLE_JOB = 75
"""Exit status of a worker that ends so that the launcher starts the whole job again."""

EXIT_STUCK = 76
"""Exit status of a worker whose training thread is stuck: the launcher replaces it at once."""


class SparseCheckpointError(RuntimeError):
    """Base of all errors raised by sparse checkpointing."""
