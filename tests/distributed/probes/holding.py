# SPDX-License-Identifier: Apache-2.0
"""Ranks that wait before an iteration for the test that started them.

A test that strikes once an iteration is committed would otherwise come later the more the machine
has to do: at last, when training has ended.
"""

import time
from pathlib import Path

from megatron.training import get_args

from moevement_ext import faults

_POLL_S = 0.01


def file(directory: Path, iteration: int) -> Path:
    """As long as it is there, no rank of the job in that directory begins the iteration."""
    return directory / f'hold-{iteration}'


def wait_to_be_let_on() -> None:
    """In a worker: before each iteration for which there is a file."""
    begins = faults.at_iteration

    def waiting(iteration: int) -> None:
        held = file(Path(get_args().sparse_ckpt_digest).parent, iteration)
        while held.exists():
            time.sleep(_POLL_S)
        begins(iteration)

    faults.at_iteration = waiting
