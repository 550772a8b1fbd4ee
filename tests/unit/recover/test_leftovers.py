# SPDX-License-Identifier: Apache-2.0
"""What earlier recoveries, and earlier times of a node, have left does not cost the next one."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from moevement_ext.faults import Phase
from moevement_ext.memory import private
from moevement_ext.memory.window.format import GENERATIONS, PREAMBLE_BYTES
from tests.unit.memory.samples import tmpfs_directory
from tests.unit.recover.fake_trainer import FakeTrainer
from tests.unit.recover.threaded_job import (
    OF_THREADS,
    STAGES,
    WINDOW,
    Fault,
    Process,
    ThreadedJob,
)

VICTIM = 1
OLDER, NEWER = WINDOW, 2 * WINDOW
LAST_SLOT = NEWER + WINDOW
"""In this iteration the last slot of the newer window is copied, and the older is still there."""
ITERATIONS = LAST_SLOT + WINDOW
NEWEST = f'window-{NEWER}-*'
_TIMEOUT_S = 60.0

pytestmark = [pytest.mark.timed, *OF_THREADS]


class DamagedJob(ThreadedJob):
    """The newest window of the first lost rank is damaged; it has no replica yet."""

    damaged = False

    def strikes(self, process: Process, phase: Phase) -> Fault | None:
        """The first fault waits until all ranks have committed the newest window.

        The iteration is the training thread's, and the sealing thread may be a slot behind it.
        """
        if phase is Phase.REPLICATE and process.rank == VICTIM and not self.damaged:
            if not any(folder_of(self, VICTIM).glob(NEWEST)):
                return None
            awaited(self._newest, STAGES)
        return super().strikes(process, phase)

    def _reap(self, process: Process) -> None:
        super()._reap(process)
        if not self.damaged:
            self.damaged = True
            damage(self._newest()[process.rank])

    def _newest(self) -> list[Path]:
        return [p for rank in range(STAGES) for p in folder_of(self, rank).glob(NEWEST)]


class Undisturbed(ThreadedJob):
    """Goes further than the others, and keeps the newest windows of the victim."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, ITERATIONS + 2 * WINDOW)
        self.kept: dict[str, bytes] = {}

    def note(self, rank: int, trainer: FakeTrainer) -> None:
        super().note(rank, trainer)
        if rank == VICTIM and trainer.iteration == self.iterations:
            paths = awaited(lambda: [*folder_of(self, VICTIM).glob('window-*')], GENERATIONS)
            self.kept = {path.name: path.read_bytes() for path in paths}


class AwayJob(ThreadedJob):
    """The node of the first lost rank is replaced by one with windows of an earlier attempt."""

    kept: Mapping[str, bytes]

    def _reap(self, process: Process) -> None:
        super()._reap(process)
        folder = folder_of(self, process.rank)
        private.make_directories(self.directory, folder)
        for name, content in self.kept.items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(0o600)


def folder_of(job: ThreadedJob, rank: int) -> Path:
    return job.directory / 'run' / f'node{rank}' / str(rank) / str(rank)


def awaited(found: Callable[[], list[Path]], count: int) -> list[Path]:
    deadline = time.monotonic() + _TIMEOUT_S
    while len(paths := found()) < count:
        assert time.monotonic() < deadline, f'there are only {paths}'
        time.sleep(0.005)
    return paths


def damage(path: Path) -> None:
    with open(path, 'r+b') as file:
        file.seek(PREAMBLE_BYTES)
        byte = file.read(1)[0]
        file.seek(PREAMBLE_BYTES)
        file.write(bytes([byte ^ 0xFF]))


@pytest.fixture(scope='module')
def undisturbed(threads_are_processes: None) -> Undisturbed:
    with tmpfs_directory() as directory:
        job = Undisturbed(directory)
        job.run()
    return job


def test_recaptured_window_is_used_by_the_next_recovery(
    undisturbed: Undisturbed,
) -> None:
    schedule = [
        Fault(VICTIM, Phase.REPLICATE, LAST_SLOT),
        Fault(VICTIM + 1, Phase.FORWARD, LAST_SLOT + 2),
    ]
    with tmpfs_directory() as directory:
        job = DamagedJob(directory, ITERATIONS, schedule, undisturbed.states)
        job.run()
    assert not job.schedule, 'not all faults have struck'
    assert job.restarts == 0
    replayed = [event.target - event.replayed for event in job.recovered if event.replayed]
    assert replayed == [OLDER, NEWER]


def test_windows_of_an_earlier_attempt_leave_room_for_a_fetched_window(
    undisturbed: Undisturbed,
) -> None:
    fault = Fault(VICTIM, Phase.FORWARD, LAST_SLOT + 1, node_lost=True)
    with tmpfs_directory() as directory:
        job = AwayJob(directory, ITERATIONS, [fault], undisturbed.states)
        job.kept = undisturbed.kept
        job.run()
    assert job.restarts == 0
    assert {event.target - event.replayed for event in job.recovered if event.replayed} == {NEWER}
