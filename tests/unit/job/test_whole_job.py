# SPDX-License-Identifier: Apache-2.0
"""A job of one rank in which a failure would restart all workers; only its trainer is a fake."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from moevement_ext import faults
from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.events import EventLog
from moevement_ext.faults import Phase
from moevement_ext.job.job import Job
from moevement_ext.membership.exchange import Exchange
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.window.name import RankIdentity
from tests.unit.memory.samples import tmpfs_directory
from tests.unit.recover.fake_trainer import Alone, FakePipeline, FakeTrainer

WINDOW = 3
ITERATIONS = 2 * WINDOW


class NotingPipeline(FakePipeline):
    """Notes in which iteration it was taken over, and what for."""

    def __init__(self) -> None:
        super().__init__(0, 1, Alone())
        self.taken_over: list[tuple[int, UpstreamLog | None]] = []

    def log_to(self, log: UpstreamLog | None) -> None:
        self.taken_over.append((self._iteration, log))
        super().log_to(log)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """The only one of its job, which no launcher has started."""
    monkeypatch.delenv('TORCHELASTIC_USE_AGENT_STORE', raising=False)
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)
    try:
        with tmpfs_directory() as directory:
            yield _rank(directory)
    finally:
        torch.distributed.destroy_process_group()


def _rank(directory: Path) -> Rank:
    config = SparseCheckpointConfig(
        window=WINDOW, replicas=0, recovery='whole-job', dir=str(directory), interface='lo'
    )
    identity = RankIdentity('run', 'pp1', 0)
    return Rank(identity, 1, 'run', 'gloo', config, EventLog(None, 0), Exchange())


def test_the_pipeline_is_taken_over_before_training_and_all_is_sealed_after_it(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exchanges of the pipeline wait for less of the device than upstream's, though no log is kept.

    Slots are sealed slowly, so that training is over before its last one is.
    """
    monkeypatch.setattr(faults, 'point', lambda phase: time.sleep(0.2 * (phase is Phase.SEAL)))
    trainer = FakeTrainer(['a', 'b', 'c', 'd'])
    trainer.pipeline = pipeline = NotingPipeline()
    job = Job(rank, None)
    job.set_up(lambda with_dense: trainer, lambda: None, last_iteration=ITERATIONS)
    assert job.protection is not None and not pipeline.taken_over

    def loop() -> None:
        while trainer.iteration < ITERATIONS:
            job.step(trainer.iteration)

    job.train(loop, trainer.around_update)
    try:
        assert pipeline.taken_over == [(0, None)]
        sealed = {header.iteration for header in job.protection.captured_after(0)}
        assert sealed == set(range(WINDOW, ITERATIONS))
    finally:
        job.close()
