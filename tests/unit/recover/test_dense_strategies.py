# SPDX-License-Identifier: Apache-2.0
"""Gemini and CheckFreq: all stages go back to a checkpoint of several iterations ago.

Processes are threads (`threaded_job`), and train a fake; every iteration has the bits of a
fault-free run.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moevement_ext.config import CHECKFREQ, GEMINI, GLOBAL, SparseCheckpointConfig
from moevement_ext.events import WindowOnDisk
from moevement_ext.faults import Phase
from moevement_ext.memory.disk import DiskWindows
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.protect.disk_tier import DiskTier
from tests.unit.recover import threaded_job
from tests.unit.recover.test_recovery import train
from tests.unit.recover.threaded_job import STAGES, Expected, Fault, ThreadedJob, install

INTERVAL = 4
STRUCK = 11
"""Its newest checkpoint is of 8, before which there is one of 4."""
PHASES = [Phase.FORWARD, Phase.NORM, Phase.STEP, Phase.AFTER_STEP]
DISTANCE = 5
ITERATIONS = STRUCK + DISTANCE * len(PHASES)

pytestmark = [
    pytest.mark.timed,
    pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning'),
]
Launch = Callable[..., ThreadedJob]


@pytest.fixture(scope='module', autouse=True)
def threads_are_processes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch)
        yield


@pytest.fixture(scope='module')
def fault_free() -> Expected:
    return train(ITERATIONS, []).states


@pytest.fixture
def launch(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault_free: Expected,
) -> Launch:
    """Train through faults with a strategy, the parameter of the fixture."""
    chosen: dict[str, Any] = {'strategy': request.param, 'interval': INTERVAL}
    if request.param == CHECKFREQ:
        chosen['disk'] = str(tmp_path)
        monkeypatch.setattr(threaded_job, 'KEPT', WindowOnDisk)

    def config(window: int, replicas: int, log_lag: float, **given: Any) -> SparseCheckpointConfig:
        return SparseCheckpointConfig(**chosen, **given)

    monkeypatch.setattr(threaded_job, 'SparseCheckpointConfig', config)
    # In vain for a window that a failure has cut off: the next one is whole then.
    monkeypatch.setattr(threaded_job, '_PERSISTED_S', 1.0)

    def train_through(schedule: list[Fault], iterations: int) -> ThreadedJob:
        job = train(iterations, schedule, fault_free)
        assert job.restarts == 0, 'who lives is not started again'
        assert {event.scope for event in job.recovered} == {GLOBAL}
        assert not any(event.differing for event in job.recovered)
        return job

    return train_through


def starts(job: ThreadedJob) -> set[int]:
    """Of the checkpoints that all went back to."""
    return {event.target - event.replayed for event in job.recovered}


BOTH = pytest.mark.parametrize('launch', [GEMINI, CHECKFREQ], indirect=True)
ON_DISK = pytest.mark.parametrize('launch', [CHECKFREQ], indirect=True)


@BOTH
@pytest.mark.parametrize('victim', range(STAGES))
def test_a_worker_is_lost_between_two_checkpoints(victim: int, launch: Launch) -> None:
    schedule = [Fault(victim, phase, STRUCK + DISTANCE * n) for n, phase in enumerate(PHASES)]
    job = launch(schedule, ITERATIONS)
    assert all(start % INTERVAL == 0 for start in starts(job))
    assert max(event.replayed for event in job.recovered) > 1


@BOTH
def test_a_node_is_lost_with_its_memory(launch: Launch) -> None:
    job = launch([Fault(1, Phase.FORWARD, STRUCK, node_lost=True)], STRUCK + 2)
    assert starts(job) == {8}


@ON_DISK
def test_a_newer_checkpoint_in_memory_is_no_source(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = DiskTier.persisted
    monkeypatch.setattr(
        DiskTier, 'persisted', lambda tier, name: name.start > 4 or offer(tier, name)
    )
    job = launch([Fault(1, Phase.FORWARD, STRUCK)], STRUCK + 2)
    assert starts(job) == {4}


@ON_DISK
def test_a_death_between_snapshot_and_disk_costs_one_checkpoint(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of one rank has half of it; the others have all."""
    write, struck = DiskWindows.write, threading.Event()

    def half_way(
        disk: DiskWindows, file: WindowFile, identity: RankIdentity, *advance: Any
    ) -> None:
        if disk.rank == 1 and file.required_name().start == 8 and not struck.is_set():
            struck.set()
            raise OSError('the disk is full')
        write(disk, file, identity, *advance)

    monkeypatch.setattr(DiskWindows, 'write', half_way)
    job = launch([Fault(1, Phase.FORWARD, STRUCK)], STRUCK + 2)
    assert struck.is_set()
    assert starts(job) == {4}
