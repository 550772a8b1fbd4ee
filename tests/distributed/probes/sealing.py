# SPDX-License-Identifier: Apache-2.0
"""Workers that die when nothing is under way: what is left does not depend on the machine's load.

Before the iteration of its death a worker waits until all that it has captured is sealed, and until
the other workers have begun that iteration, too: none of them is behind, and rolls back as well.
"""

import os
import time
from collections.abc import Collection, Iterable
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from moevement_ext import faults
from moevement_ext.faults import Fault, Phase
from moevement_ext.job.modes import LocalizedMode
from moevement_ext.membership.rendezvous import launcher_store
from moevement_ext.protect.checkpointer import SparseCheckpointer
from moevement_ext.protect.statistics import CaptureStatistics

_DEADLINE = timedelta(seconds=120)
_POLL_S = 0.01
_PHASES = list(Phase)
_OF_A_RECOVERY = frozenset(_PHASES[_PHASES.index(Phase.DETECT) :])


def seal_before_death() -> None:
    """In a worker. Without a launcher's store it cannot wait for the others."""
    _arrange({Phase.AFTER_STEP})


def all_step_before_death() -> None:
    """The same; also the others have stepped when a worker dies in an update.

    Only where no rank waits for parameters of another one.
    """
    _arrange({Phase.NORM, Phase.STEP, Phase.AFTER_STEP})


def _arrange(late: Collection[Phase]) -> None:
    begin, committed, point = SparseCheckpointer.begin, LocalizedMode.committed, faults.point
    store = launcher_store(_DEADLINE)

    def begin_and_seal(checkpointer: SparseCheckpointer, iteration: int, *given: Any) -> None:
        armed = {fault.phase for fault in faults._armed if fault.iteration == iteration + 1}
        # In a recovery the others are not in an iteration.
        waits = bool(armed - _OF_A_RECOVERY)
        _tell(store, 'committed', iteration)
        if armed:
            checkpointer.drain()
        if waits:
            _wait(store, 'committed', iteration)
        begin(checkpointer, iteration, *given)
        _tell(store, 'begun', iteration)
        if armed:
            checkpointer.drain()
        if waits:
            _wait(store, 'begun', iteration)

    def committed_and_told(mode: LocalizedMode, start: Any) -> None:
        committed(mode, start)
        _tell(store, 'committed', start.iteration)

    def late_point(phase: Phase) -> None:
        if phase in late and _dies_here(phase):
            _wait(store, 'committed', faults._iteration)
        point(phase)

    SparseCheckpointer.begin = begin_and_seal  # type: ignore[method-assign]
    LocalizedMode.committed = committed_and_told  # type: ignore[method-assign]
    faults.point = late_point


def persist_before_death() -> None:
    """The same as `seal_before_death`; and all ranks have each complete window of this one."""
    seal_before_death()
    begin = SparseCheckpointer.begin

    def begin_and_persist(checkpointer: SparseCheckpointer, iteration: int, *given: Any) -> None:
        begin(checkpointer, iteration, *given)
        if any(fault.iteration == iteration + 1 for fault in faults._armed):
            deadline = time.monotonic() + _DEADLINE.total_seconds()
            while _is_awaited(checkpointer.statistics):
                assert time.monotonic() < deadline, 'the newest window is not persisted'
                time.sleep(_POLL_S)

    SparseCheckpointer.begin = begin_and_persist  # type: ignore[method-assign]


def _is_awaited(figures: CaptureStatistics) -> bool:
    """True if this rank's newest window is not persisted."""
    if figures.committed is None:
        return False
    return figures.persisted is None or figures.persisted < figures.committed


def peers_die_together() -> None:
    """Ranks that die in the same phase of the same iteration; none may wait for another there."""
    store, point = launcher_store(_DEADLINE), faults.point

    def point_in_turn(phase: Phase) -> None:
        if _dies_here(phase):
            place = f':{faults._iteration}:{phase}:'
            deaths = os.environ['MOEVEMENT_FAIL_AT'].split(',')
            _tell(store, phase, faults._iteration)
            peers = (death.partition(':')[0] for death in deaths if place in f'{death}:')
            _wait(store, phase, faults._iteration, peers)
        point(phase)

    faults.point = point_in_turn


def _dies_here(phase: Phase) -> bool:
    return Fault(faults._iteration, phase) in faults._armed


def _tell(store: Store | None, what: str, iteration: int) -> None:
    if store is not None:
        store.set(_key(what, iteration, os.environ['RANK']), '')


def _wait(store: Store | None, what: str, iteration: int, ranks: Iterable[object] = ()) -> None:
    """Until some ranks have told it, all others unless they are given; it is not taken back."""
    if store is not None:
        own = int(os.environ['RANK'])
        found = [*ranks] or [one for one in range(int(os.environ['WORLD_SIZE'])) if one != own]
        store.wait([_key(what, iteration, rank) for rank in found], _DEADLINE)


def _key(what: str, iteration: int, rank: object) -> str:
    return f'probe/{what}/{iteration}/{rank}'
