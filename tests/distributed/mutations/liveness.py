# SPDX-License-Identifier: Apache-2.0
"""Ways for a worker to be stuck, or slow, without being dead."""

import os
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from subprocess import Popen

from torch.utils.data import dataloader

from moevement_ext import faults
from moevement_ext.faults import Phase
from moevement_ext.job import own_device
from moevement_ext.job.modes import LocalizedMode
from moevement_ext.membership.rendezvous import launcher_store
from moevement_ext.system.nvml import Finding
from tests.distributed.probes import holding
from tests.support.blocked import block


def loader_of_rank_2_blocks() -> None:
    """For ever, in iteration 8 of its first attempt."""
    _loader_blocks('2', 8)


def loader_of_rank_2_waits_for_a_page() -> None:
    """For some seconds, with Python's lock, in iteration 8 of its first attempt."""
    pipe = Path(tempfile.mkdtemp()) / 'pipe'
    Popen(['sh', '-c', f'until [ -p {pipe} ]; do sleep 1; done; sleep 20; : > {pipe}'])
    _loader_blocks('2', 8, lambda: pipe.exists() or block(pipe))


def held_ranks_and_a_loader_that_blocks() -> None:
    """All wait for the test; the loader of rank 3 blocks in iteration 8 of its first attempt."""
    holding.new_workers_wait_to_be_let_on()
    _loader_blocks('3', 8)


def _loader_blocks(
    rank: str, iteration: int, blocks: Callable[[], object] = lambda: threading.Event().wait()
) -> None:
    if (os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']) != (rank, '0'):
        return
    iterator = dataloader._SingleProcessDataLoaderIter
    next_data = iterator._next_data

    def blocking(self):
        if faults._iteration >= iteration:
            blocks()
        return next_data(self)

    iterator._next_data = blocking


def rank_1_steps_when_the_others_have() -> None:
    """In iteration 9 of its first attempt: so all of them have that iteration if it dies there."""
    store = launcher_store(timedelta(seconds=60))
    point, committed = faults.point, LocalizedMode.committed
    world, rank = int(os.environ['WORLD_SIZE']), os.environ['RANK']

    def counting(self, start):
        committed(self, start)
        if start.iteration == 9 and rank != '1':
            store.add('have-stepped', 1)

    def waiting(phase):
        if (faults._iteration, phase) == (9, Phase.STEP):
            while store.add('have-stepped', 0) < world - 1:
                time.sleep(0.01)
        point(phase)

    LocalizedMode.committed = counting
    if (rank, os.environ['TORCHELASTIC_RESTART_COUNT']) == ('1', '0'):
        faults.point = waiting


class _Device:
    """One that is lost in iteration 8; only the driver notices."""

    def read(self) -> list[Finding]:
        lost = [Finding('GPU-2', 'the driver does not reach it')]
        return lost if faults._iteration >= 8 else []


def device_of_rank_2_is_lost() -> None:
    """In its first attempt; its training thread hangs from then on, as in a collective."""
    if (os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']) == ('2', '0'):
        own_device._own = _Device
        loader_of_rank_2_blocks()
