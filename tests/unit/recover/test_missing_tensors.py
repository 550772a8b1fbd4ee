# SPDX-License-Identifier: Apache-2.0
"""A replay does not wait for ever for a tensor that its neighbour never logged.

Processes are threads, as in `test_recovery.py`; the middle stage of the pipeline is lost, or two
neighbours are, of which each waits for the other.
"""

from datetime import timedelta
from typing import Any

import pytest
import torch

from moevement_ext.faults import Phase
from moevement_ext.membership.membership import Membership
from moevement_ext.membership.rendezvous import Rendezvous
from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.upstream_log.record import Direction
from moevement_ext.recover import fruitless
from tests.unit.memory.samples import tmpfs_directory
from tests.unit.recover import threaded_job
from tests.unit.recover.fake_trainer import MICRO_BATCHES
from tests.unit.recover.threaded_job import (
    OF_THREADS,
    STAGES,
    Expected,
    Fault,
    ThreadedJob,
    _present,
)

pytestmark = OF_THREADS

ITERATIONS = 12
NEWEST = 9


def test_missing_last_tensor_of_the_newest_iteration_restarts_the_whole_job(
    fault_free: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every window is refused for it, and the whole job starts again from its memory.

    The last stage lacks it: it sends nothing of the next iteration before the lost one has sent.
    """
    append, logged = UpstreamLog.append, []

    def leave_out(log: UpstreamLog, t: int, direction: Direction, tensor: torch.Tensor) -> None:
        process = _present()
        if process is not None and (process.rank, t) == (STAGES - 1, NEWEST):
            logged.append(tensor)
            if len(logged) == MICRO_BATCHES:
                return
        append(log, t, direction, tensor)

    monkeypatch.setattr(UpstreamLog, 'append', leave_out)
    with tmpfs_directory() as directory:
        fault = Fault(1, Phase.FORWARD, NEWEST + 1)
        job = ThreadedJob(directory, ITERATIONS, [fault], fault_free)
        job.run()
    assert len(logged) >= MICRO_BATCHES and not job.schedule
    assert job.restarts == 1
    assert {rank for rank, iteration in job.states if iteration == ITERATIONS} == set(range(STAGES))


COLLECTIVE_S = 3.0


@pytest.mark.timed
def test_of_neighbours_that_replay_each_waits_for_the_other(
    fault_free: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No wait is longer than a collective may take, and waits that bring nothing are counted.

    The first stage sends less in its replay than it had: the second one waits for that, the first
    one for a gradient, and neither log tells that a tensor is never going to come.
    """
    append, missing = UpstreamLog.append, []
    seen: dict[int, int] = {}

    def leave_out(log: UpstreamLog, t: int, direction: Direction, tensor: torch.Tensor) -> None:
        process = _present()
        if process is not None and (process.rank, t) == (0, NEWEST):
            count = seen[id(log)] = seen.get(id(log), 0) + 1
            if 0 in job.began and not job.restarts and count % MICRO_BATCHES == 0:
                missing.append(tensor)
                return
        append(log, t, direction, tensor)

    def impatient(place: Rendezvous, timeout: timedelta, *rest: Any, **more: Any) -> Membership:
        return Membership(place, timedelta(seconds=COLLECTIVE_S), *rest, **more)

    monkeypatch.setattr(UpstreamLog, 'append', leave_out)
    monkeypatch.setattr(threaded_job, 'Membership', impatient)
    monkeypatch.setattr(fruitless, 'MOST', 2)
    with tmpfs_directory() as directory:
        both = [Fault(1, Phase.FORWARD, NEWEST + 1), Fault(0, Phase.DETECT)]
        job = ThreadedJob(directory, ITERATIONS, both, fault_free)
        job.run()
    assert missing and not job.schedule
    assert job.restarts == 1
    assert {rank for rank, iteration in job.states if iteration == ITERATIONS} == set(range(STAGES))
