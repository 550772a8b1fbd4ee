# SPDX-License-Identifier: Apache-2.0
"""Steps of recovery left out that only a backend like NCCL needs, and faults only it can have."""

import os
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

from moevement_ext import faults
from moevement_ext.faults import Phase
from moevement_ext.membership.standstill import Standstill
from moevement_ext.recover.localized import LocalizedRecovery
from moevement_ext.regroup import nccl
from tests.distributed.harness import nccl_like

_LOOKS_OF_A_WAIT_THAT_LASTS = 20
"""It does not end by itself: the rank that it waits for hangs."""


def all_others_wait_when_one_dies(phases: Collection[Phase] = tuple(Phase)) -> None:
    """A death, in some phases, comes when every other rank waits for what cannot end without it.

    So it does not depend on the speed of the machine what the others are doing.
    """
    folder = Path(sys.argv[sys.argv.index('--sparse-ckpt-events') + 1]).parent
    wait, point = nccl_like._Operation.wait, faults.point
    mine = folder / f'waits-{os.environ["RANK"]}'
    others = [folder / f'waits-{rank}' for rank in range(int(os.environ['WORLD_SIZE']))]
    others.remove(mine)
    begun = []

    def seen_wait(operation: nccl_like._Operation) -> None:
        begun.append(operation.name)
        mine.write_text(f'{len(begun)} {operation.name}')
        wait(operation)
        mine.unlink()

    def later_point(phase: faults.Phase) -> None:
        if phase in phases and faults.Fault(faults._iteration, phase) in faults._armed:
            _until_lasting(lambda: [path.read_text() for path in others])
        point(phase)

    nccl_like._Operation.wait = seen_wait
    faults.point = later_point


def _until_lasting(waits: Callable[[], list[str]]) -> None:
    """Return when the same waits have been there all the time."""
    before, looks = [], 0
    while looks < _LOOKS_OF_A_WAIT_THAT_LASTS:
        time.sleep(0.05)
        try:
            now = waits()
        except FileNotFoundError:
            now = []
        looks = looks + 1 if now and now == before else 0
        before = now


def garbage_is_not_looked_for() -> None:
    """Survivors update with whatever an aborted collective has left."""
    all_others_wait_when_one_dies()
    LocalizedRecovery._raise_if_broken = lambda self: None
    LocalizedRecovery.committing = lambda self: None


def groups_of_calls_stay_open() -> None:
    """A coalescing region that an error cut off is only forgotten."""
    all_others_wait_when_one_dies()
    nccl.Nccl.end_calls = lambda self: None


def aborts_one_after_the_other() -> None:
    """Each is waited for before the next begins."""
    all_others_wait_when_one_dies()
    close = nccl.Nccl.close
    nccl.Nccl.close = lambda self, backends: [close(self, [backend]) for backend in backends]


def hang_deaths_and_a_lost_gpu() -> None:
    """First rank 2 hangs; some deaths come when all wait; GPU 3 is lost by one in iteration 26."""
    rank_2_hangs_in_a_collective(4)
    all_others_wait_when_one_dies({Phase.P2P, Phase.OPTIMIZER})
    gpu_of_rank_3_is_lost(26)


def rank_2_hangs_in_a_collective(iteration: int = 8) -> None:
    """Once, in that iteration, without being stuck by itself; collectives may take 10 s."""
    end_hang, wait = Standstill._end_hang, nccl_like.waits._wait
    mine = (os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']) == ('2', '0')
    hung = []

    def sooner(self, *args):
        allowed, self._timeout_s = self._timeout_s, 10.0
        end_hang(self, *args)
        self._timeout_s = allowed

    def hang(work):
        if mine and faults._iteration >= iteration and not hung:
            hung.append(work)
            raise RuntimeError('it takes for ever')
        return wait(work)

    Standstill._end_hang = sooner
    nccl_like.waits._wait = hang


def gpu_of_rank_3_is_lost(iteration: int = 0) -> None:
    """By a death from that iteration on: what it had mapped of that one's memory is gone."""
    if (os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']) == ('3', '0'):
        check = nccl.Nccl.check_device

        def lost(self):
            check(self)
            if faults._iteration >= iteration:
                raise RuntimeError('CUDA error: an illegal memory access was encountered')

        nccl.Nccl.check_device = lost
