# SPDX-License-Identifier: Apache-2.0
"""A job of one rank in which a failure would restart all workers; only its trainer is a fake."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from moevement_ext import faults
from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.errors import UserError
from moevement_ext.events import EventLog
from moevement_ext.faults import Phase
from moevement_ext.job.job import Job
from moevement_ext.membership.exchange import Exchange
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.window.name import RankIdentity
from tests.unit.memory.samples import tmpfs_directory
from tests.unit.recover.fake_trainer import Alone, FakePipeline, FakeTrainer

pytestmark = pytest.mark.timed

WINDOW = 3
ITERATIONS = 2 * WINDOW


class NotingPipeline(FakePipeline):
    """Records the iteration and the log of each `log_to`."""

    def __init__(self) -> None:
        super().__init__(0, 1, Alone())
        self.taken_over: list[tuple[int, UpstreamLog | None]] = []

    def log_to(self, log: UpstreamLog | None) -> None:
        self.taken_over.append((self._iteration, log))
        super().log_to(log)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """The only rank of a job without a launcher."""
    monkeypatch.delenv('TORCHELASTIC_USE_AGENT_STORE', raising=False)
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)
    try:
        with tmpfs_directory() as directory:
            yield _rank(directory)
    finally:
        torch.distributed.destroy_process_group()


def _rank(directory: Path, run: str = 'run') -> Rank:
    return Rank(
        RankIdentity(run, 'pp1', 0),
        1,
        'run',
        'gloo',
        _config(directory),
        EventLog(None, 0),
        Exchange(),
    )


def _config(directory: Path) -> SparseCheckpointConfig:
    return SparseCheckpointConfig(
        window=WINDOW, replicas=0, recovery='whole-job', dir=str(directory), interface='lo'
    )


def test_pipeline_is_taken_over_before_training_and_slots_are_sealed(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pipeline exchanges wait for less of the device than upstream's, although no log is kept.

    Slots are sealed slowly, so that training ends before the last slot is sealed.
    """
    monkeypatch.setattr(faults, 'point', lambda phase: time.sleep(0.2 * (phase is Phase.SEAL)))
    trainer = FakeTrainer(['a', 'b', 'c', 'd'])
    trainer.pipeline = pipeline = NotingPipeline()
    job = Job(rank, None)
    job.set_up(lambda with_dense: trainer, lambda: None, last_iteration=ITERATIONS)
    assert not pipeline.taken_over

    def loop() -> None:
        while trainer.iteration < ITERATIONS:
            job.step(trainer.iteration)

    job.train(loop)
    try:
        assert pipeline.taken_over == [(0, None)] and job.protection is not None
        sealed = {header.iteration for header in job.protection.captured_after(0)}
        assert sealed == set(range(WINDOW, ITERATIONS))
    finally:
        job.close()


@contextmanager
def attempt(rank: Rank, iterations: int) -> Iterator[Job]:
    """Run an attempt of the job up to `iterations`; its windows remain."""
    trainer = FakeTrainer(['a', 'b', 'c', 'd'])
    job = Job(rank, None)
    job.set_up(lambda with_dense: trainer, lambda: None, last_iteration=2 * ITERATIONS)

    def loop() -> None:
        while trainer.iteration < iterations:
            job.step(trainer.iteration)

    try:
        job.train(loop)
        yield job
    finally:
        job.close(remove=False)


def recorded(job: Job) -> list[int]:
    assert job.protection is not None
    ledger = job.protection.memory.ledger
    return [t for t in range(2 * ITERATIONS) if ledger.get(t) is not None]


@pytest.mark.parametrize(
    ('windows_lost', 'believed'),
    [(False, range(1, WINDOW + WINDOW)), (True, range(0))],
    ids=['from a window', 'from the start'],
)
def test_attempt_that_begins_earlier_ignores_the_previous_ledger(
    windows_lost: bool, believed: range, rank: Rank
) -> None:
    """Its norms may differ, for example with another dense checkpoint or other kernels."""
    with attempt(rank, ITERATIONS) as job:
        assert recorded(job) == list(range(1, ITERATIONS + 1))
        assert job.protection is not None
        files = [
            job.protection.memory.windows.file(w.name)
            for w in job.protection.memory.windows.committed()
        ]
    if windows_lost:
        for file in files:
            assert file is not None
            file.path.unlink()
    with attempt(rank, 0) as job:
        assert job.restarted != windows_lost
        assert recorded(job) == list(believed)


def test_conversion_restores_ledger_entries_of_replayed_iterations(rank: Rank) -> None:
    """A stage lost after a recovery from disk needs the entries to replay alone."""
    with attempt(rank, ITERATIONS) as job:
        assert job.protection is not None
        ledger = job.protection.memory.ledger
        expected = [ledger.get(t) for t in range(WINDOW + 1, ITERATIONS + 1)]
        assert None not in expected
    ledger.path.unlink()
    with attempt(rank, ITERATIONS) as job:
        assert job.restarted and job.protection is not None
        ledger = job.protection.memory.ledger
        assert recorded(job) == list(range(WINDOW + 1, ITERATIONS + 1))
        assert [ledger.get(t) for t in recorded(job)] == expected


def _run(rank: Rank, last_iteration: int, remove: bool = True) -> int:
    """Run an attempt of the job; return the iteration at which training began."""
    trainer = FakeTrainer(['a', 'b', 'c', 'd'])
    job = Job(rank, None)
    job.set_up(lambda with_dense: trainer, lambda: None, last_iteration=last_iteration)
    began = []

    def loop() -> None:
        while trainer.iteration < last_iteration:
            began.append(trainer.iteration)
            job.step(trainer.iteration)

    job.train(loop)
    job.close(remove)
    return began[0]


def _windows(rank: Rank) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(rank.config.dir).rglob('window-*.window')}


def test_export_deletes_no_windows(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at its end nor with the flags of another run."""
    directory = Path(rank.config.dir)
    _run(rank, 3 * WINDOW, remove=False)
    kept = _windows(rank)
    assert kept
    monkeypatch.setenv('MOEVEMENT_EXPORT', 'memory')
    with pytest.raises(UserError, match='export: no window of the run run in .* fits these flags'):
        _run(_rank(directory, 'other'), 3 * WINDOW)
    assert _windows(rank) == kept
    assert _run(_rank(directory), 3 * WINDOW + 1) > 0
    assert set(kept) & set(_windows(rank))
