# SPDX-License-Identifier: Apache-2.0
"""What a replay takes over; and that it does not wait once another failure is announced."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.membership.rendezvous import RoundEnded
from moevement_ext.membership.report import Report
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.upstream_log.record import Direction
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.recover.sources import ArrivingWindow
from moevement_ext.recover.stage_replay import StageReplay
from tests.unit.memory.samples import RUN, TOPOLOGY, tmpfs_directory
from tests.unit.recover.fake_trainer import FakeTrainer
from tests.unit.replicate.peers import silent_peer
from tests.unit.replicate.test_host_memory import CANDIDATE, Job

pytestmark = pytest.mark.timeout(60)


class Replay:
    """Of the second of two stages, whose watching thread says when the round is ended."""

    def __init__(self, job: Job) -> None:
        self.memory = job.ranks[1]
        self.trainer = FakeTrainer(['a'], 1, 2)
        self.broken = threading.Event()
        config = SparseCheckpointConfig()
        rank = SimpleNamespace(identity=RankIdentity(RUN, TOPOLOGY, 1), number=1, config=config)
        self.of_stage = StageReplay(
            rank,  # type: ignore[arg-type]
            self.trainer,  # type: ignore[arg-type]
            SimpleNamespace(memory=self.memory),  # type: ignore[arg-type]
            lambda phase: None,
            self.raise_if_broken,
        )

    def raise_if_broken(self) -> None:
        if self.broken.is_set():
            raise RoundEnded('another rank is gone')

    def end_round(self) -> None:
        """As the watching thread does, before anything is waited for."""
        self.broken.set()
        self.of_stage.interrupt()


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replay]:
    with tmpfs_directory() as shm:
        job = Job(Path(shm), monkeypatch)
        yield Replay(job)
        job.stop()


def test_replay_does_not_wait_for_a_neighbour_that_sends_no_more(replay: Replay) -> None:
    replay.memory.ledger.append(LedgerEntry(1, [1.0], [], 2, 1))
    replay.end_round()
    with pytest.raises(RoundEnded), replay.of_stage._from_logs(0, 1):
        received = replay.trainer.pipeline._received
        assert received is not None
        received[Direction.DOWN].take(1, 0, timeout_s=1.0)  # type: ignore[call-arg]
    assert replay.of_stage._waiting == []
    assert not [it for it in threading.enumerate() if it.name.startswith('log-reader')]


def test_ledger_of_another_attempt_is_not_trusted(replay: Replay) -> None:
    """A rank that comes to a node where it had been long ago finds what it left there."""
    now = [LedgerEntry(t, [float(t)], [], 2, 8 * t) for t in range(1, 5)]
    ledger = replay.memory.ledger
    for entry in (
        now[0],
        msgspec.structs.replace(now[1], grad_norms=[9.0]),
        msgspec.structs.replace(now[2], grad_norms=[3.0, 9.0]),  # of two optimizers
        msgspec.structs.replace(now[3], grad_norms=[9.0]),
    ):
        ledger.append(entry)
    survivor = Report(survivor=True, node='a', pid=1, windows=[], ledger=now[:3])
    new = Report(survivor=False, node='b', pid=2, windows=[])
    replay.of_stage.take_over_ledger(3, [survivor, new], [0, 1])
    assert [found and found.grad_norms for found in map(ledger.get, range(1, 5))] == [
        [1.0],
        [2.0],
        [3.0, 9.0],
        None,
    ]


def test_ledgers_of_the_stage_precede_the_ledger_of_the_node(
    replay: Replay,
) -> None:
    replay.memory.ledger.append(LedgerEntry(1, [1.0, 9.0], [], 2, 8))  # of two optimizers
    recorded = LedgerEntry(1, [1.0], [], 2, 8)
    survivor = Report(survivor=True, node='a', pid=1, windows=[], ledger=[recorded])
    new = Report(survivor=False, node='b', pid=2, windows=[])
    replay.of_stage.take_over_ledger(1, [survivor, new], [0, 0])
    assert replay.memory.ledger.get(1) == recorded


def test_catch_up_counts_the_evaluations_that_it_skips(replay: Replay) -> None:
    """The stage captures again; its windows must agree with those of the other stages."""
    for iteration, validation in ((4, 16), (5, 24), (6, None)):
        entry = LedgerEntry(iteration, [1.0], [], 2, 8 * iteration, consumed_valid=validation)
        replay.memory.ledger.append(entry)
    state, captured = replay.trainer.auxiliary_state, []
    state.iteration, state.validation = 3, 16

    def capture(iteration: int) -> None:
        captured.append((iteration, state.iteration, state.validation))

    replay.of_stage._catch_up(3, 6, capture)
    assert captured == [(3, 3, 16), (4, 4, 24), (5, 5, 24)]
    assert state.iteration == 6


def test_replay_does_not_wait_for_a_missing_window(replay: Replay) -> None:
    replay.end_round()
    with silent_peer(greets=True) as address:
        replay.memory.addresses[0] = address
        identity = RankIdentity(RUN, TOPOLOGY, 1)
        source = ArrivingWindow(replay.memory, CANDIDATE, [[], []], identity)
        with pytest.raises(RoundEnded), replay.of_stage._waiting_for(source):
            pytest.fail('it is waited for')
    assert replay.of_stage._waiting == []
