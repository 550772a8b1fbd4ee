# SPDX-License-Identifier: Apache-2.0
"""Export: a relaunch by `moevement windows export` that only saves what the run's windows have.

An export needs a window that fits its flags. Without one it ends instead of training from scratch,
which would overwrite the windows. The windows remain after an export.
"""

import os

from moevement_ext.errors import UserError

VARIABLE = 'MOEVEMENT_EXPORT'
"""Environment variable of an export; its value is the tier to read."""
_MEMORY = 'memory'


def is_export() -> bool:
    """True if this process belongs to an export."""
    return VARIABLE in os.environ


def reads_memory() -> bool:
    """True if this is an export from host memory, which must not delete the windows there."""
    return os.environ.get(VARIABLE) == _MEMORY


def refuse_without_window(directory: str, run_id: str) -> None:
    """End an export that found no window, with a `UserError`; does nothing in other runs."""
    if is_export():
        raise UserError(
            f'export: no window of the run {run_id} in {directory} fits these flags; after -- give '
            'the command that launched the run, with the same flags.'
        )
