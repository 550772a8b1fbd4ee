# SPDX-License-Identifier: Apache-2.0
"""A run that is launched again only to save what its windows hold, by `tools.windows export`.

It reads them: without one that fits its flags it does not train from the start, which would take
the place of what was to be read; and at its end they stay.
"""

import os

from moevement_ext.errors import UserError

VARIABLE = 'MOEVEMENT_EXPORT'
"""Set in the environment of such a run, to what it reads."""
_MEMORY = 'memory'


def is_export() -> bool:
    """This process belongs to such a run."""
    return VARIABLE in os.environ


def reads_memory() -> bool:
    """It does, and what it reads is in host memory; else that is as at the end of other runs."""
    return os.environ.get(VARIABLE) == _MEMORY


def refuse_without_window(directory: str, run_id: str) -> None:
    """No window is recovered from.

    Raises:
        UserError: the run is to do nothing else.
    """
    if is_export():
        raise UserError(
            f'export: no window of the run {run_id} in {directory} fits these flags; after -- give '
            'the command that the run was launched by, with the same flags.'
        )
