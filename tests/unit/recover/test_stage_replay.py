# SPDX-License-Identifier: Apache-2.0
"""What a replay takes over; and that it does not wait once another failure is announced."""

import threading
from collections.abc import Iterator, Sequence
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
from moevement_ext.recover.verdict import Localized
from moevement_ext.replicate import host_memory
from moevement_ext.replicate.secret import of_attempt
from tests.unit.memory.samples import RUN, SECRET, TOPOLOGY
from tests.unit.recover.fake_trainer import FakeTrainer
from tests.unit.replicate.peers import silent_peer
from tests.unit.replicate.test_host_memory import CANDIDATE, Job

pytestmark = pytest.mark.timeout(60)


class Replay:
    """Of the second of two stages, whose watching thread says when the round is ended."""

    def __init__(self, job: Job) -> None:
        self.job = job
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
def replay(shm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replay]:
    job = Job(shm, monkeypatch, ('node-a', 'node-b', 'node-c'))
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


OF_JOB = of_attempt(SECRET, SECRET)
NEW = Report(survivor=False, node='b', process=2, windows=[])
NOW = [LedgerEntry(t, [float(t)], [], 2, 8 * t) for t in range(1, 5)]


def take_over(
    replay: Replay,
    target: int,
    stage_of: list[int],
    own: Report = NEW,
    others: Sequence[tuple[str, int]] = (),
) -> list[list[float] | None]:
    """Norms of iterations 1 to 4 in the ledger of rank 1, which has asked rank 0 and `others`."""
    addresses = [replay.job.ranks[0].server.address, None, *others]
    reports = [
        Report(survivor=True, node='a', process=1, windows=[], address=it) for it in addresses
    ]
    reports[1] = own
    own = frozenset({1})
    verdict = Localized(target=target, stages=own, ranks=own, window=CANDIDATE)
    replay.of_stage.take_over_ledger(verdict, reports, stage_of, replay.broken.is_set)
    found = map(replay.memory.ledger.get, range(1, 5))
    return [entry and entry.grad_norms for entry in found]


def test_ledger_of_another_attempt_is_not_trusted(replay: Replay) -> None:
    for entry in NOW[:3]:
        replay.job.ranks[0].ledger.append(entry)
    for entry, norms in zip(NOW, ([1.0], [9.0], [3.0, 9.0], [9.0]), strict=True):
        # The third is of two optimizers.
        replay.memory.ledger.append(msgspec.structs.replace(entry, grad_norms=norms))
    assert take_over(replay, 3, [0, 1]) == [[1.0], [2.0], [3.0, 9.0], None]


def test_ledgers_of_the_stage_precede_the_nodes(
    replay: Replay,
) -> None:
    replay.memory.ledger.append(LedgerEntry(1, [1.0, 9.0], [], 2, 8))  # of two optimizers
    replay.job.ranks[0].ledger.append(LedgerEntry(1, [1.0], [], 2, 8, loss=3.0))
    take_over(replay, 1, [0, 0])
    assert replay.memory.ledger.get(1) == LedgerEntry(1, [1.0], [], 2, 8), 'a loss is of one rank'


def test_lacking_entries_come_from_others(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    second, last = replay.job.ranks[0], replay.job.ranks[2]
    second.ledger.append(NOW[2])
    for entry in NOW:
        norms = [*entry.grad_norms, 9.0] if entry is NOW[2] else entry.grad_norms
        last.ledger.append(msgspec.structs.replace(entry, grad_norms=norms))
    monkeypatch.setattr(host_memory, '_LEDGER_TIMEOUT_S', 1.0)
    with silent_peer(True, OF_JOB) as silent:
        found = take_over(replay, 4, [1, 1, 1, 0], NEW, [silent, last.server.address])
    assert found == [entry.grad_norms for entry in NOW]
    assert [replay.memory.ledger.get(it.iteration) for it in NOW] == NOW


@pytest.mark.parametrize('broken', [False, True])
def test_survivor_or_broken_round_asks_nobody(replay: Replay, broken: bool) -> None:
    for entry in NOW:
        replay.job.ranks[0].ledger.append(entry)
        if not broken:
            replay.memory.ledger.append(msgspec.structs.replace(entry, grad_norms=[9.0]))
    if broken:
        replay.broken.set()
    survivor = msgspec.structs.replace(NEW, survivor=True)
    found = take_over(replay, 4, [0, 1], NEW if broken else survivor)
    assert found == ([None] * 4 if broken else [[9.0]] * 4)


def test_catch_up_counts_the_evaluations_that_it_skips(replay: Replay) -> None:
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
