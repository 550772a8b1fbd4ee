# SPDX-License-Identifier: Apache-2.0
"""What a replay needs is damaged, of another attempt, with a lost holder, or was never logged.

Processes are threads, as in `test_recovery.py`.
"""

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from moevement_ext.faults import Phase
from moevement_ext.membership.membership import Membership
from moevement_ext.membership.rendezvous import Rendezvous
from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.upstream_log.record import Direction
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import PREAMBLE_BYTES
from moevement_ext.memory.window.name import TRIES, Window
from moevement_ext.recover import fruitless
from moevement_ext.replicate.host_memory import HostMemory
from tests.unit.recover.fake_trainer import MICRO_BATCHES
from tests.unit.recover.threaded_job import (
    OF_THREADS,
    STAGES,
    WINDOW,
    Expected,
    Fault,
    Process,
    ThreadedJob,
    _present,
    train,
)
from tests.unit.replicate.peers import wait_for

ITERATIONS = 12
VICTIM = 1
OLDER, NEWER = WINDOW, 2 * WINDOW
LAST_SLOT = NEWER + WINDOW
"""In this iteration the last slot of the newer window is copied, and the older is still there."""
LOST = Fault(VICTIM, Phase.FORWARD, 2 * WINDOW + 1, node_lost=True)
COLLECTIVE_S = 3.0

pytestmark = [pytest.mark.timed, *OF_THREADS]


# Damaged windows, and windows of another attempt


def windows_of(job: ThreadedJob, rank: int) -> Path:
    return job.directory / 'run' / f'node{rank}' / str(rank) / str(rank)


class DamagedJob(ThreadedJob):
    """The newest window of the first lost rank is damaged; it has no replica yet."""

    damaged = False

    def strikes(self, process: Process, phase: Phase) -> Fault | None:
        """The first fault waits until all ranks have committed the newest window.

        The iteration is the training thread's, and the sealing thread may be a slot behind it.
        """
        if phase is Phase.REPLICATE and process.rank == VICTIM and not self.damaged:
            if not self._newest(VICTIM):
                return None
            wait_for(lambda: all(map(self._newest, range(STAGES))))
        return super().strikes(process, phase)

    def _reap(self, process: Process) -> None:
        super()._reap(process)
        if not self.damaged:
            self.damaged = True
            (path,) = self._newest(process.rank)
            content = bytearray(path.read_bytes())
            content[PREAMBLE_BYTES] ^= 0xFF
            path.write_bytes(content)

    def _newest(self, rank: int) -> list[Path]:
        return [*windows_of(self, rank).glob(f'window-{NEWER}-*')]


def test_recaptured_window_is_used_by_the_next_recovery(fault_free: Expected) -> None:
    first = Fault(VICTIM, Phase.REPLICATE, LAST_SLOT)
    schedule = [first, Fault(VICTIM + 1, Phase.FORWARD, LAST_SLOT + 2)]
    job = train(ITERATIONS, schedule, fault_free, DamagedJob)
    assert job.restarts == 0
    replayed = [event.target - event.replayed for event in job.recovered if event.replayed]
    assert replayed == [OLDER, NEWER]


# Holders


@pytest.mark.parametrize('dies', [True, False])
def test_lost_holder_is_asked_again_and_silent_one_a_limited_number_of_times(
    dies: bool, fault_free: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server ends when the replica is first asked for; so does its process once noticed.

    The memory of its node still exists; no survivor has to restart.
    """
    asked: list[Process] = []
    killed: list[Process] = []
    fetch, leave = HostMemory.fetch, Membership.leave

    def fetch_from_it(memory: HostMemory, window: Window, rank: int, *others: Any) -> WindowFile:
        found = (thread for thread in threading.enumerate() if thread.name == f'rank {rank}')
        asked.append(next(found).process)  # type: ignore[attr-defined]
        if len(asked) == 1:
            held = asked[0].protected
            assert held is not None and held.reserved is not None
            held.reserved.memory.server.stop()
        return fetch(memory, window, rank, *others)

    def leave_when_it_is_dead(membership: Membership, reason: str) -> None:
        if dies and asked and not killed:
            killed.append(asked[0])
            asked[0].kill()
        leave(membership, reason)

    monkeypatch.setattr(HostMemory, 'fetch', fetch_from_it)
    monkeypatch.setattr(Membership, 'leave', leave_when_it_is_dead)
    job = train(ITERATIONS, [LOST], fault_free)
    # The last one is asked by the whole job.
    assert (len(asked), job.restarts) == ((2, 0) if dies else (TRIES + 1, 1))
    assert not dies or {event.scope for event in job.recovered} == {'localized'}


# Tensors that were never logged


def test_missing_last_tensor(fault_free: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every window is refused for it, and the whole job starts again from its memory.

    The last stage lacks it: it sends nothing of the next iteration before the lost one has sent.
    """
    append, logged = UpstreamLog.append, []

    def leave_out(log: UpstreamLog, t: int, direction: Direction, tensor: torch.Tensor) -> None:
        process = _present()
        if process is not None and (process.rank, t) == (STAGES - 1, LAST_SLOT):
            logged.append(tensor)
            if len(logged) == MICRO_BATCHES:
                return
        append(log, t, direction, tensor)

    monkeypatch.setattr(UpstreamLog, 'append', leave_out)
    job = train(ITERATIONS, [Fault(1, Phase.FORWARD, LAST_SLOT + 1)], fault_free)
    assert len(logged) >= MICRO_BATCHES and job.restarts == 1


def test_replays_wait_for_each_other(fault_free: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait is longer than a collective may take, and waits that bring nothing are counted.

    The first stage sends less in its replay than it had: the second one waits for that, the first
    one for a gradient, and neither log tells that a tensor is never going to come.
    """
    append, missing = UpstreamLog.append, []
    seen: dict[int, int] = {}

    def leave_out(log: UpstreamLog, t: int, direction: Direction, tensor: torch.Tensor) -> None:
        process = _present()
        if process is not None and (process.rank, t) == (0, LAST_SLOT):
            count = seen[id(log)] = seen.get(id(log), 0) + 1
            job = process.job
            if 0 in job.began and not job.restarts and count % MICRO_BATCHES == 0:
                missing.append(tensor)
                return
        append(log, t, direction, tensor)

    join = Membership.join

    def impatient(place: Rendezvous, timeout: timedelta, *rest: Any, **more: Any) -> Membership:
        return join(place, timedelta(seconds=COLLECTIVE_S), *rest, **more)

    monkeypatch.setattr(UpstreamLog, 'append', leave_out)
    monkeypatch.setattr(Membership, 'join', impatient)
    monkeypatch.setattr(fruitless, 'MOST', 2)
    both = [Fault(1, Phase.FORWARD, LAST_SLOT + 1), Fault(0, Phase.DETECT)]
    assert train(ITERATIONS, both, fault_free).restarts == 1
    assert missing
