# SPDX-License-Identifier: Apache-2.0
import random
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Barrier

import pytest
from torch.distributed import Store, TCPStore

from moevement_ext.errors import SparseCheckpointError
from moevement_ext.rendezvous import launcher_store, meet

REPOSITORY = Path(__file__).parents[2]
WORLD = 4
TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def launcher() -> TCPStore:
    """The store of the launcher, which outlives its workers."""
    return TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


@pytest.fixture
def connections(launcher: TCPStore) -> list[TCPStore]:
    """One to the launcher's store for each rank; its lives, which never overlap, share it."""
    return [connect(launcher) for _ in range(WORLD)]


def connect(launcher: TCPStore) -> TCPStore:
    return TCPStore('127.0.0.1', launcher.port, is_master=False, timeout=TIMEOUT)


def meet_all(connections: Sequence[TCPStore], ranks: Sequence[int] = range(WORLD)) -> list[Store]:
    """One life of each rank, all started at the same moment; the store each of them got."""
    together = Barrier(len(ranks))

    def life(rank: int) -> Store:
        together.wait()
        return meet(connections[rank], rank, WORLD, TIMEOUT)

    with ThreadPoolExecutor(len(ranks)) as lives:
        return list(lives.map(life, ranks))


def assert_one_new_epoch(stores: Sequence[Store], mark: str) -> None:
    """All have the same store, and it has nothing of an earlier epoch."""
    assert not stores[0].check(['mark'])
    stores[0].set('mark', mark)
    assert {store.get('mark').decode() for store in stores} == {mark}


def test_all_ranks_meet_in_one_store(connections: list[TCPStore]) -> None:
    assert_one_new_epoch(meet_all(connections), 'first')


def test_a_new_life_of_all_ranks_meets_elsewhere(connections: list[TCPStore]) -> None:
    assert_one_new_epoch(meet_all(connections), 'first')
    assert_one_new_epoch(meet_all(connections), 'second')


_FIRST_LIFE = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
from moevement_ext.rendezvous import meet
timeout = timedelta(seconds=60)
store = TCPStore('127.0.0.1', int(sys.argv[1]), is_master=False, timeout=timeout)
meet(store, 1, 4, timeout)
"""


def test_second_life_of_one_rank_opens_a_new_epoch_and_everybody_follows(
    launcher: TCPStore, connections: list[TCPStore]
) -> None:
    """Rank 1 is killed while it waits for ranks 2 and 3; rank 0 waits all the time."""
    with ThreadPoolExecutor(1) as rank0:
        waiting = rank0.submit(meet, connections[0], 0, WORLD, TIMEOUT)
        victim = subprocess.Popen(
            [sys.executable, '-c', _FIRST_LIFE, str(launcher.port)], cwd=REPOSITORY
        )
        launcher.wait(['join/0/0', 'join/0/1'], TIMEOUT)
        victim.kill()
        assert victim.wait() == -9
        others = meet_all(connections, [1, 2, 3])
        stores = [waiting.result(), *others]
    assert_one_new_epoch(stores, 'after the kill')
    assert not launcher.check(['epoch/0/mark'])


def test_fifty_random_returns(launcher: TCPStore, connections: list[TCPStore]) -> None:
    """Any ranks die at any time before the others have come; nobody stays in their epoch."""
    chance = random.Random(7)
    for turn in range(50):
        epoch = launcher.add('epoch', 0)
        for rank in chance.sample(range(WORLD), chance.randrange(WORLD + 1)):
            # All that a worker leaves behind that was killed as soon as it had joined.
            launcher.compare_set(f'join/{epoch}/{rank}', '', 'dead')
        assert_one_new_epoch(meet_all(connections, chance.sample(range(WORLD), WORLD)), str(turn))


def test_several_return_at_the_same_moment(connections: list[TCPStore]) -> None:
    """Who is second to leave an epoch must not take it, full of the dead, for a complete one."""
    for turn in range(20):
        assert_one_new_epoch(meet_all(connections), str(turn))


def test_timeout_names_the_missing_ranks(launcher: TCPStore) -> None:
    launcher.compare_set('join/0/2', '', 'another')
    with pytest.raises(SparseCheckpointError, match=r'Ranks \[1, 3\] did not start within 0.2 s'):
        meet(connect(launcher), 0, WORLD, timedelta(seconds=0.2))


def test_store_of_the_launcher(launcher: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv('TORCHELASTIC_USE_AGENT_STORE', raising=False)
    assert launcher_store(TIMEOUT) is None
    monkeypatch.setenv('TORCHELASTIC_USE_AGENT_STORE', 'True')
    monkeypatch.setenv('MASTER_ADDR', '127.0.0.1')
    monkeypatch.setenv('MASTER_PORT', str(launcher.port))
    launcher.set('from', 'launcher')
    store = launcher_store(TIMEOUT)
    assert store is not None
    assert store.get('from') == b'launcher'
