# SPDX-License-Identifier: Apache-2.0
"""Why a job is given up."""

from moevement_ext.errors import SparseCheckpointError


class LaunchError(SparseCheckpointError):
    """The job cannot go on.

    Attributes:
        exit_code: that the launcher ends with.
    """

    exit_code = 1
