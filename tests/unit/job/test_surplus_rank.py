# SPDX-License-Identifier: Apache-2.0
"""A rank without a place in the layout follows the messages of rank 0 of this start only."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from moevement_ext.config import SparseCheckpointConfig, node_name
from moevement_ext.job import surplus_rank
from moevement_ext.job.surplus_rank import SurplusRank
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.memory.window.settings import Layout, Placed, Seat
from moevement_ext.recover.reshard import surplus
from moevement_ext.recover.reshard.surplus import Call, Dismissed, LetGo, SurplusAnswer
from moevement_ext.replicate.secret import VARIABLE

IDENTITY = RankIdentity('run', 'topology', 0, placed=Placed('training', Layout(2), Seat()))
HOUR = timedelta(hours=1)
ENDS_AT_ALL_S = 60.0


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[TCPStore]:
    """The store of a job of three ranks, two of which train, as the third rank sees it."""
    made = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    variables = {'RANK': '2', 'WORLD_SIZE': '3', 'MASTER_ADDR': '127.0.0.1', VARIABLE: 'x' * 16}
    for name, value in (variables | {'MASTER_PORT': str(made.port)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv('MOEVEMENT_SURPLUS_RANKS', '')  # so that monkeypatch restores it
    monkeypatch.delenv('MOEVEMENT_SURPLUS_RANKS')
    monkeypatch.setattr(surplus_rank, '_LOOKS_FOR_ITS_LAUNCHER', timedelta(milliseconds=50))
    surplus.set_aside(2)
    assert surplus.is_surplus()
    yield made


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Files that another layout has left on this node."""
    left = tmp_path / 'run.0123abcd' / node_name()
    left.mkdir(parents=True, mode=0o700)
    return left


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Callable[[], int]]]:
    """Start a surplus rank; the returned function waits for its exit status."""
    threads = []

    def start(timeout: timedelta = HOUR) -> Callable[[], int]:
        codes: list[int] = []
        config = SparseCheckpointConfig(dir=str(tmp_path), elastic='restart')
        one = SurplusRank(IDENTITY, config, 'run.ffffffff', timeout)
        thread = threading.Thread(target=lambda: codes.append(one.serve()), daemon=True)
        thread.start()
        threads.append(thread)

        def code() -> int:
            thread.join(ENDS_AT_ALL_S)
            return codes[0]

        return code

    yield start
    for thread in threads:
        thread.join(ENDS_AT_ALL_S)
        assert not thread.is_alive()


def asked() -> list[SurplusAnswer]:
    return surplus._answers(Call(b'salt', ['elsewhere']))


def test_surplus_rank_answers_each_call_and_ends_with_the_job(
    store: TCPStore, old: Path, serve: Callable[..., Callable[[], int]]
) -> None:
    code = serve()
    first, second = asked(), asked()
    assert [len(first), len(second)] == [1, 1]
    assert first[0].stock.runs == ['run.0123abcd']
    assert first[0].port != second[0].port, 'each start has a secret of its own'
    surplus.dismiss(17, freed=False)
    assert code() == 17
    assert old.exists()


@pytest.mark.parametrize('message', [LetGo(), Dismissed(0, freed=True)], ids=['then', 'late'])
def test_surplus_rank_frees_obsolete_windows(
    message: surplus.Message,
    store: TCPStore,
    old: Path,
    serve: Callable[..., Callable[[], int]],
) -> None:
    code = serve()
    asked()
    surplus._tell(message)
    surplus.dismiss(0, freed=False)
    assert code() == 0
    assert not old.exists()


@pytest.mark.parametrize('message', [LetGo(), Dismissed(3, freed=True)])
def test_messages_of_an_earlier_start_are_ignored(
    message: surplus.Message,
    store: TCPStore,
    old: Path,
    serve: Callable[..., Callable[[], int]],
) -> None:
    surplus._tell(message)
    code = serve()
    assert len(asked()) == 1
    surplus.dismiss(0, freed=False)
    assert code() == 0
    assert old.exists()


def test_surplus_rank_fails_when_its_launcher_is_gone(
    store: TCPStore, serve: Callable[..., Callable[[], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live launcher restarts it with the other ranks."""
    code = serve()
    asked()
    monkeypatch.setattr('os.getppid', lambda: 1)
    assert code() == 1
