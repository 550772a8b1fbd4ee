# SPDX-License-Identifier: Apache-2.0
"""Base classes of errors, their lists, and exit statuses for launchers and scripts."""

from collections.abc import Sequence

EXIT_USER_ERROR = 2
"""Exit status of a program that ends because of a `UserError`, as for a wrong flag."""

EXIT_WHOLE_JOB = 75
"""Exit status of a worker that requests a restart of the whole job."""

EXIT_STUCK = 76
"""Exit status of a worker whose training thread is stuck, or whose GPU is lost: the launcher
replaces the worker at once."""


EXIT_OTHER_BITS = 77
"""Exit status of a job whose recovery computed other bits than before, which
`--sparse-ckpt-verify stop` forbids: another start would begin the same replay."""


class SparseCheckpointError(RuntimeError):
    """Base class of the errors of sparse checkpointing; the message names the cause."""


class UserError(SparseCheckpointError):
    """An error that the user can fix: one line with the flag or file, the rule, the remedy.

    Programs end with that line and `EXIT_USER_ERROR` instead of a traceback.
    """


class HostMemoryError(UserError):
    """The requested host memory is not available; the message has the numbers and the fix."""


class LaunchError(SparseCheckpointError):
    """The job cannot continue; `exit_code` is the exit status of the launcher."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def some(names: Sequence[object], most: int = 8, between: str = ', ') -> str:
    """The first names, and how many more there are."""
    more = f' and {len(names) - most} more' if len(names) > most else ''
    return between.join(map(str, names[:most])) + more
