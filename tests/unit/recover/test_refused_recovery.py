# SPDX-License-Identifier: Apache-2.0
"""`--sparse-ckpt-verify stop`: nothing is gone on from that was captured in a refused recovery.

Processes are threads (see `threaded_job`). A chip computes other bits where one of them recomputes
an iteration, so often; every state in the end is that of a run without failure, bit for bit.
"""

import functools
import itertools
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moevement_ext.faults import Phase
from moevement_ext.recover.stage_replay import StageReplay
from moevement_ext.replicate.replicator import Replicator
from tests.quick import with_quick
from tests.unit.memory.samples import tmpfs_directory
from tests.unit.recover import threaded_job
from tests.unit.recover.fake_trainer import FakeTrainer
from tests.unit.recover.threaded_job import (
    OF_THREADS,
    STAGES,
    WINDOW,
    Expected,
    Fault,
    Process,
    ThreadedJob,
)
from tests.unit.replicate.peers import wait_for

START = 3 * WINDOW
"""Of the newest window that all have; of the one after it the victim's last slot is missing."""
STRUCK = START + 2 * WINDOW + 1
ALL_STRUCK = START + 4 * WINDOW - 1
ITERATIONS = ALL_STRUCK + WINDOW
NO_WAITING = 10**6

pytestmark = [pytest.mark.timed, *OF_THREADS]


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Jobs refuse a recovery that differs; more settings may be given."""
    config = threaded_job.SparseCheckpointConfig

    def settle(**more: Any) -> None:
        settings = {'verify': 'stop', **more}
        monkeypatch.setattr(
            threaded_job, 'SparseCheckpointConfig', functools.partial(config, **settings)
        )

    settle()
    return settle


class WrongChip:
    """Of the process of one rank: a bit flips before an iteration that is computed again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, at: int, times: int) -> None:
        self._rank = rank
        self._at = at
        self.left = times
        self._newest = -1
        self._iterate = FakeTrainer.iterate
        monkeypatch.setattr(FakeTrainer, 'iterate', lambda trainer, i: self.iterate(trainer, i))

    def iterate(self, trainer: FakeTrainer, iteration: int) -> None:
        if trainer.place.stage == self._rank:
            if iteration == self._at < self._newest and self.left:
                self.left -= 1
                name = trainer.operators.names[0]
                master = trainer.operators.master[name].numpy().tobytes()
                trainer.operators.write(name, bytes(byte ^ 1 for byte in master))
            self._newest = max(self._newest, iteration)
        self._iterate(trainer, iteration)


class WithEvidence(ThreadedJob):
    """Rank 1 is struck when its holder has all but one slot of a window that all others have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *args: Any) -> None:
        super().__init__(*args)
        self.struck = False
        self._there = threading.Event()
        self._of_the_struck: Replicator | None = None
        send = Replicator._send

        def held_back(replicator: Replicator, job: Any, slot: int, peer: Any) -> None:
            incomplete = replicator.owner == 1 and job.name.start == START + WINDOW
            if incomplete and not self.struck:
                self._of_the_struck = replicator
            if incomplete and slot == WINDOW - 1 and replicator is self._of_the_struck:
                raise ConnectionError('held back')  # also in what is left of it once it is struck
            send(replicator, job, slot, peer)
            if incomplete and slot == WINDOW - 2:
                self._there.set()

        monkeypatch.setattr(Replicator, '_send', held_back)

    def note(self, rank: int, trainer: FakeTrainer) -> None:
        super().note(rank, trainer)
        if trainer.iteration > START + WINDOW:
            self.persisted = NO_WAITING  # no window is, for a while
        if rank == 1 and trainer.iteration == STRUCK - 1 and not self.struck:
            assert self._there.wait(120)

    def _reap(self, process: Process) -> None:
        self.struck = True
        super()._reap(process)


def differing(job: ThreadedJob, expected: Expected) -> list[tuple[int, int]]:
    keys = itertools.product(range(STAGES), range(1, job.iterations + 1))
    return [key for key in keys if job.states[key] != expected[key]]


def run_to_the_end(job: ThreadedJob) -> None:
    job.run()
    assert not job.schedule, 'not all faults have struck'


NOTHING_MORE = None
SAME_RANK = Fault(1, Phase.DETECT)
OTHER_RANK = Fault(0, Phase.DETECT)
OTHER_NODE = Fault(0, Phase.DETECT, node_lost=True)


@pytest.mark.parametrize(
    'meanwhile',
    with_quick([NOTHING_MORE, SAME_RANK, OTHER_RANK, OTHER_NODE], NOTHING_MORE, OTHER_NODE),
)
@pytest.mark.parametrize('times', with_quick([1, 2], 2))
def test_refused_replay_is_not_continued(
    times: int,
    meanwhile: Fault | None,
    stops: Callable[..., None],
    fault_free: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if a rank dies when it is refused, be it the one that alone knows of that."""
    chip = WrongChip(monkeypatch, rank=1, at=START + WINDOW - 1, times=times)
    with tmpfs_directory() as directory:
        schedule = [Fault(1, Phase.P2P, STRUCK, node_lost=True)]
        job = WithEvidence(monkeypatch, directory, ITERATIONS, schedule)
        replay, refusals = StageReplay.run, []

        def judged(self: StageReplay, *args: Any) -> None:
            try:
                replay(self, *args)
            except StageReplay.Refused as refusal:
                refusals.append(str(refusal))
                if meanwhile is not None and len(refusals) == 1:
                    job.schedule.append(meanwhile)
                raise

        monkeypatch.setattr(StageReplay, 'run', judged)
        run_to_the_end(job)
    assert refusals and 'differing: 5' in refusals[0], 'four operators and the loss'
    assert not chip.left
    assert differing(job, fault_free) == []


def test_captures_of_a_replay_that_was_cut_off_are_no_evidence(
    stops: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `report`, too: a chip that is wrong in both replays alike is reported."""
    stops(verify='report')
    WrongChip(monkeypatch, rank=1, at=START + WINDOW - 1, times=2)
    with tmpfs_directory() as directory:
        schedule = [Fault(1, Phase.P2P, STRUCK, node_lost=True), Fault(1, Phase.REPLAYED)]
        job = WithEvidence(monkeypatch, directory, ITERATIONS, schedule)
        run_to_the_end(job)
    assert [len(event.differing) for event in job.recovered if event.replayed] == [4]


@pytest.mark.parametrize('on_disk', with_quick([0, 1, 2], 0, 2))
def test_refused_start_of_the_whole_job_is_not_continued(
    on_disk: int,
    stops: Callable[..., None],
    fault_free: Expected,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Nor is it a witness for the next; on the way back to an old window much is captured.

    So many windows are left on disk, and none in memory; without a disk the newest are. The chip
    computes other bits in each recovery from a window.
    """
    if on_disk:
        stops(disk=str(tmp_path), disk_every=2 * WINDOW)
    chip = WrongChip(monkeypatch, rank=0, at=ALL_STRUCK - WINDOW - 2, times=max(on_disk, 1))
    with tmpfs_directory() as directory:
        job = _FromAnOldWindow(directory, ITERATIONS, on_disk, tmp_path / 'run')
        run_to_the_end(job)
    assert not chip.left
    assert job.restarts == 1 + max(on_disk, 1)
    assert differing(job, fault_free) == []


class _FromAnOldWindow(ThreadedJob):
    """All die, and a node is lost; with a disk, only its oldest windows are left."""

    def __init__(self, directory: Path, iterations: int, on_disk: int, disk: Path) -> None:
        super().__init__(directory, iterations, [Fault(0, Phase.P2P, ALL_STRUCK, all_die=True)])
        self._on_disk = on_disk
        self._disk = disk

    def note(self, rank: int, trainer: FakeTrainer) -> None:
        super().note(rank, trainer)
        if self._on_disk and trainer.iteration == ALL_STRUCK - 1 and not self.restarts:
            wait_for(lambda: len(self._everywhere()) >= self._on_disk)

    def _everywhere(self) -> set[int]:
        ranks = [self._disk.glob(f'rank{rank}/window-*') for rank in range(STAGES)]
        return set.intersection(*({_start(path) for path in paths} for paths in ranks))

    def _start_all_again(self, running: dict[int, Process], first: Process) -> dict[int, Process]:
        self.restarts += 1
        self._kill(running)
        self._reap(first)
        self.persisted = -1
        if self.restarts == 1:
            shutil.rmtree(self.directory / 'run' / 'node1')
            if self._on_disk:
                kept = sorted(self._everywhere())[: self._on_disk]
                for path in self._disk.glob('rank*/window-*'):
                    if _start(path) not in kept:
                        path.unlink()
                for path in self.directory.glob('run/node*/*/1'):
                    shutil.rmtree(path)
        return {rank: Process(self, rank) for rank in range(STAGES)}


def _start(path: Path) -> int:
    return int(path.name.split('-')[1])
