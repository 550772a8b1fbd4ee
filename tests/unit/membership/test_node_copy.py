# SPDX-License-Identifier: Apache-2.0
"""One rank of a node reads a value from the store for all of them, as an optimization only."""

import fcntl
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import DistStoreError

from moevement_ext.membership import node_copy
from moevement_ext.membership.node_copy import NodeCopy, digest_of

pytestmark = pytest.mark.timed

CONTENT = bytes(range(256)) * 100
DIGEST = digest_of(CONTENT)
RANKS = 8


class Asked:
    """A slow store."""

    def __init__(self, takes_s: float = 0.05) -> None:
        self.times = 0
        self._takes_s = takes_s
        self._lock = threading.Lock()

    def __call__(self) -> bytes:
        with self._lock:
            self.times += 1
        time.sleep(self._takes_s)
        return CONTENT


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / 'run' / 'node' / 'shared'


@pytest.fixture
def copy(tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> NodeCopy:
    monkeypatch.setattr(node_copy, '_LONGEST_WAIT_S', 60.0)  # even on a loaded machine
    return NodeCopy(tmp_path, directory)


def read_by_all(copy: NodeCopy, asked: Asked) -> None:
    with ThreadPoolExecutor(RANKS) as ranks:
        found = [ranks.submit(copy.read, DIGEST, asked) for _ in range(RANKS)]
        assert all(future.result() == CONTENT for future in found)


def test_ranks_of_a_node_send_one_request(copy: NodeCopy) -> None:
    asked = Asked()
    read_by_all(copy, asked)
    assert asked.times == 1


def test_copies_of_earlier_rendezvous_are_deleted(copy: NodeCopy, directory: Path) -> None:
    earlier = b'another'
    assert copy.read(digest_of(earlier), lambda: earlier) == earlier
    read_by_all(copy, Asked())
    assert sorted(path.name for path in directory.iterdir()) == [
        f'brought-{DIGEST.hex()}',
        'brought.lock',
    ]


@pytest.mark.parametrize('damaged', [b'', CONTENT[:-1], CONTENT[:-1] + b'?'])
def test_damaged_copy_is_replaced(damaged: bytes, copy: NodeCopy, directory: Path) -> None:
    """A rank was killed while writing, or memory is faulty."""
    copy.read(DIGEST, Asked())
    (directory / f'brought-{DIGEST.hex()}').write_bytes(damaged)
    again = Asked()
    read_by_all(copy, again)
    assert again.times == 1


def test_ranks_do_not_wait_for_a_stopped_rank(
    copy: NodeCopy, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_copy, '_LONGEST_WAIT_S', 0.2)
    directory.mkdir(mode=0o700, parents=True)
    for level in (directory, directory.parent, directory.parent.parent):
        level.chmod(0o700)
    stopped = os.open(directory / 'brought.lock', os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(stopped, fcntl.LOCK_EX)
    asked = Asked()
    read_by_all(copy, asked)
    assert asked.times == RANKS
    assert not list(directory.glob('brought-*')), 'a process without the lock leaves nothing'
    os.close(stopped)
    read_by_all(copy, asked)
    assert asked.times == RANKS + 1


def test_foreign_directory_is_not_used(tmp_path: Path) -> None:
    elsewhere = tmp_path / 'elsewhere'
    elsewhere.mkdir()
    (tmp_path / 'run').symlink_to(elsewhere)
    asked = Asked()
    assert NodeCopy(tmp_path, tmp_path / 'run' / 'node').read(DIGEST, asked) == CONTENT
    assert asked.times == 1 and not list(elsewhere.iterdir())


def test_store_error_is_raised_and_the_next_rank_asks(copy: NodeCopy) -> None:
    def lost() -> bytes:
        raise DistStoreError('lost')

    with pytest.raises(DistStoreError):
        copy.read(DIGEST, lost)
    asked = Asked()
    read_by_all(copy, asked)
    assert asked.times == 1
