# SPDX-License-Identifier: Apache-2.0
"""Error that ends a job."""

from moevement_ext.errors import SparseCheckpointError


class LaunchError(SparseCheckpointError):
    """The job cannot continue; `exit_code` is the exit status of the launcher."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
