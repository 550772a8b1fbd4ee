# SPDX-License-Identifier: Apache-2.0
"""Base classes of errors, and exit statuses that launchers and scripts can tell apart."""

EXIT_USER_ERROR = 2
"""Exit status of a program that ends because of a `UserError`, as for a wrong flag."""

EXIT_WHOLE_JOB = 75
"""Exit status of a worker that ends so that the launcher starts the whole job again."""

EXIT_STUCK = 76
"""Exit status of a worker whose training thread is stuck, or whose GPU is lost: the launcher
replaces it at once."""


class SparseCheckpointError(RuntimeError):
    """Base of the errors of sparse checkpointing; the message says what was wrong."""


class UserError(SparseCheckpointError):
    """What the user can mend: the message is one line with the flag or file, the rule, the remedy.

    Programs end with that line and `EXIT_USER_ERROR` instead of a traceback.
    """


class HostMemoryError(UserError):
    """The host memory asked for is not there; the message has the numbers and the fix."""
