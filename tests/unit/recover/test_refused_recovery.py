# SPDX-License-Identifier: Apache-2.0
"""`--sparse-ckpt-verify stop`: a recovery that computes other bits ends the job, and windows stay.

Processes are threads (see `threaded_job`). A chip computes other bits where one of them recomputes
an iteration. The next start has the states of a run without failure, bit for bit.
"""

import threading
from pathlib import Path
from typing import Any

import pytest

from moevement_ext.config import GLOBAL, LOCALIZED
from moevement_ext.errors import EXIT_OTHER_BITS
from moevement_ext.faults import Phase
from moevement_ext.recover.stage_replay import OtherBits, StageReplay
from moevement_ext.replicate.replicator import Replicator
from tests.unit.memory.samples import tmpfs_directory
from tests.unit.recover.fake_trainer import FakeTrainer
from tests.unit.recover.threaded_job import (
    OF_THREADS,
    STAGES,
    WINDOW,
    Expected,
    Fault,
    Process,
    ThreadedJob,
    train,
)

START = 3 * WINDOW
"""Of the newest window that all have; of the one after it the victim's last slot is missing."""
STRUCK = START + 2 * WINDOW + 1
ALL_STRUCK = START + 4 * WINDOW - 1
LAST = STRUCK + 2 * WINDOW
ITERATIONS = STRUCK + 8 * WINDOW
NO_WAITING = 10**6
STOP = {'verify': 'stop'}

pytestmark = [pytest.mark.timed, *OF_THREADS]


class WrongChip:
    """Of the process of one rank: a bit flips before an iteration that is computed again, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, at: int) -> None:
        self._rank = rank
        self._at = at
        self.left = 1
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


class Ended(Exception):
    """The launcher ends the job."""


class Launched(ThreadedJob):
    """Its launcher restarts nothing after that exit status."""

    def _reap(self, process: Process) -> None:
        if process.code == EXIT_OTHER_BITS:
            process.release()
            raise Ended
        super()._reap(process)


class WithEvidence(Launched):
    """Rank 1 is struck when its holder has all but one slot of a window that all others have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
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


def windows_in(directory: Path) -> set[Path]:
    return {*directory.glob('run/*/*/*/window-*')}


def named(windows: set[Path]) -> set[tuple[str, str]]:
    """Owners and names of windows, of any holder."""
    return {(path.parent.name, path.name) for path in windows}


def is_as_without_failure(directory: Path, expected: Expected) -> None:
    """The next start: the chip is replaced, and what was recorded first judges again."""
    job = Launched(directory, LAST, [], expected, **STOP)
    job.run()
    assert len(job.recovered) == STAGES, 'all have gone on from windows'
    assert not any(event.differing for event in job.recovered)


OTHER_NODE = Fault(0, Phase.DETECT, node_lost=True)


@pytest.mark.parametrize('meanwhile', [None, OTHER_NODE], ids=['', 'another is lost'])
def test_refused_replay_is_not_continued(
    meanwhile: Fault | None,
    fault_free: Expected,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    chip = WrongChip(monkeypatch, rank=1, at=START + WINDOW - 1)
    with tmpfs_directory() as directory:
        schedule = [Fault(1, Phase.P2P, STRUCK, node_lost=True)]
        job = WithEvidence(monkeypatch, directory, LAST, schedule, **STOP)
        replay, before, kept = StageReplay.run, set[Path](), set[Path]()

        def judged(self: StageReplay, *args: Any) -> None:
            before.update(windows_in(directory))
            try:
                replay(self, *args)
            except OtherBits:
                kept.update(windows_in(directory))
                job.schedule += [] if meanwhile is None else [meanwhile]
                raise

        monkeypatch.setattr(StageReplay, 'run', judged)
        with pytest.raises(Ended):
            job.run()
        assert not chip.left and not job.schedule
        if meanwhile is None:
            left = windows_in(directory)
            assert left >= kept >= before
            # The new node may still have been sent copies of windows that others have.
            assert named(left) == named(kept), 'none is captured'
            own = {path.name for path in kept - before if path.parent.name == '1'}
            assert all(name.startswith(f'window-{START}-') for name in own), 'but fetched'
            is_as_without_failure(directory, fault_free)
    (said,) = {text for text in caplog.messages if 'the job ends with exit status 77' in text}
    assert 'rank 1: window' in said and 'differing: 5 (1.a from iteration' in said


@pytest.mark.parametrize('forgets', [False, True], ids=['', 'without the record of a rank'])
def test_refused_start_of_the_whole_job_is_not_continued(
    forgets: bool,
    fault_free: Expected,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    WrongChip(monkeypatch, rank=0, at=ALL_STRUCK - WINDOW + 1)
    with tmpfs_directory() as directory:
        # All have recorded the iteration before, and none has this one.
        fault = Fault(int(forgets), Phase.OPTIMIZER, ALL_STRUCK, node_lost=forgets, all_die=True)
        job = Launched(directory, LAST, [fault], **STOP)
        with pytest.raises(Ended):
            job.run()
        assert job.restarts == 1
        assert len(job.recovered) <= forgets, 'it has nothing to object to'
        files = directory.glob('run/*/*/*/w*-*')  # window- or writing-
        histories = {path.name.split('-')[2][:16] for path in files}
        assert len(histories) == 1, 'nothing is captured on the way'
        is_as_without_failure(directory, fault_free)
    assert any('rank 0: ' in text and 'exit status 77' in text for text in caplog.messages)


@pytest.mark.parametrize('recovery', [LOCALIZED, GLOBAL])
def test_windows_begin_again_once_a_recovery_is_judged(recovery: str, fault_free: Expected) -> None:
    schedule = [
        Fault(1, Phase.P2P, STRUCK),
        Fault(1, Phase.CATCH_UP),
        Fault(0, Phase.P2P, STRUCK + 1, node_lost=True),
        Fault(2, Phase.P2P, STRUCK + 4 * WINDOW, all_die=True),
        Fault(1, Phase.P2P, STRUCK + 4 * WINDOW + 1),
        Fault(0, Phase.P2P, STRUCK + 7 * WINDOW),
    ]
    job = train(ITERATIONS, schedule, fault_free, recovery=recovery, **STOP)
    assert job.recovered and not any(event.differing for event in job.recovered)
