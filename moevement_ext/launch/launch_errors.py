# SPDX-License-Identifier: Apache-2.0
"""Errors that end a job."""

from moevement_ext.errors import EXIT_USER_ERROR, SparseCheckpointError


class LaunchError(SparseCheckpointError):
    """The job cannot continue; `exit_code` is the exit status of the launcher."""

    exit_code = 1


class UserMistake(LaunchError):
    """A worker rejected its flags or its environment."""

    exit_code = EXIT_USER_ERROR
