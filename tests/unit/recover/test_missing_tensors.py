# SPDX-License-Identifier: Apache-2.0
"""A replay does not wait for ever for a tensor that its neighbour never logged.

Processes are threads, as in `test_recovery.py`; the middle stage of the pipeline is lost.
"""

from collections.abc import Iterator

import pytest
import torch

from moevement_ext.faults import Phase
from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.upstream_log.record import Direction
from tests.unit.memory.samples import tmpfs_directory
from tests.unit.recover.fake_trainer import MICRO_BATCHES
from tests.unit.recover.threaded_job import STAGES, Expected, Fault, ThreadedJob, _present, install

# A thread of a dead one may look at it once more, as none of a dead process does.
pytestmark = pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')

ITERATIONS = 12
NEWEST = 9


@pytest.fixture(scope='module', autouse=True)
def threads_are_processes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch)
        yield


@pytest.fixture(scope='module')
def fault_free(threads_are_processes: None) -> Expected:
    with tmpfs_directory() as directory:
        job = ThreadedJob(directory, ITERATIONS)
        job.run()
    return job.states


def test_the_last_tensor_of_the_newest_iteration(
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
