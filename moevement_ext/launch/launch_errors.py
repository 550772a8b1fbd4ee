# SPDX-License-Identifier: Apache-2.0
"""Why a job is given up."""

from moevement_ext.errors import EXIT_USER_ERROR, SparseCheckpointError


class LaunchError(SparseCheckpointError):
    """The job cannot go on.

    Attributes:
        exit_code: that the launcher ends with.
    """

    exit_code = 1


class UserMistake(LaunchError):
    """A worker has refused what it was started with."""

    exit_code = EXIT_USER_ERROR
