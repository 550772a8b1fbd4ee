# SPDX-License-Identifier: Apache-2.0
"""Ranks that wait for the test that started them: before an iteration, or before they begin.

A test that faults once an iteration is committed would otherwise come later the more the machine
has to do: at last, when training has ended.
"""

import os
import sys
import time
from pathlib import Path

from megatron.training import get_args

from moevement_ext import faults

_POLL_S = 0.01


def file(directory: Path, iteration: int) -> Path:
    """As long as it is there, no rank of the job in that directory begins the iteration."""
    return directory / f'hold-{iteration}'


def all_wait(directory: Path, iteration: int, ranks: int) -> bool:
    """True once all ranks have come to that iteration, for which there was a file."""
    held = file(directory, iteration)
    return all(_waits(held, rank).exists() for rank in range(ranks))


def _waits(held: Path, rank: object) -> Path:
    return held.with_name(f'{held.name}-{rank}')


def wait_to_be_let_on() -> None:
    """In a worker: before each iteration for which there is a file."""
    begins = faults.at_iteration

    def waiting(iteration: int) -> None:
        held = file(Path(get_args().sparse_ckpt_digest).parent, iteration)
        if held.exists():
            _waits(held, os.environ['RANK']).touch()
        while held.exists():
            time.sleep(_POLL_S)
        begins(iteration)

    faults.at_iteration = waiting


def new_workers(directory: Path) -> Path:
    """As long as it is there, no rank that takes the place of another one begins."""
    return directory / 'hold-new-workers'


def new_workers_wait_to_be_let_on() -> None:
    """In a worker, also of a job whose ranks wait before iterations."""
    wait_to_be_let_on()
    if os.environ['TORCHELASTIC_RESTART_COUNT'] != '0':
        events = Path(sys.argv[sys.argv.index('--sparse-ckpt-events') + 1])
        while new_workers(events.parent).exists():
            time.sleep(_POLL_S)
