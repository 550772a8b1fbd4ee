# SPDX-License-Identifier: Apache-2.0
"""Where the secret of a job comes from, and which processes never learn it."""

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from moevement_ext.config import ConfigurationError
from moevement_ext.errors import HostMemoryError
from moevement_ext.membership import exchange
from moevement_ext.membership.exchange import Exchange
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.replicate import host_memory, secret
from moevement_ext.replicate.secret import VARIABLE, agree, mark, marks_here
from tests.unit.recover import threaded_job

GIVEN = 'a secret that the user gives'


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, 'WORLD_SIZE', 'GROUP_WORLD_SIZE'):
        monkeypatch.delenv(name, raising=False)


class Ranks(Exchange):
    """Ranks of a job, whose rank 0 says first what it has."""

    def __init__(self, store: TCPStore, rank: int, joining: bool = False) -> None:
        super().__init__(store, joining)
        self._store, self._rank = store, rank

    def __call__(self, name: str, own: bytes) -> list[bytes]:
        if not self.joining:
            exchange.leave(self._store, name, self._rank, own)
        return exchange.left_by_all(self._store, name, [0])

    @staticmethod
    def from_first(own: bytes, ranks: Sequence[int], group: Any) -> bytes:
        """A process that reaches the store may sit between the ranks of a group."""
        raise AssertionError('a secret is sent over a process group')


def store() -> TCPStore:
    return TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)


def contents(of: TCPStore) -> list[bytes]:
    """All that a stranger can read in a store, as it stands and unpacked."""
    found = []
    for key in of.list_keys():
        value = of.get(key)
        found.append(value)
        for begin in (0, 4):
            try:
                found.append(zlib.decompress(value[begin:]))
            except zlib.error:
                continue
    return found


def test_given_secret_is_used_and_lets_any_node_join(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, GIVEN)
    result = store()
    for rank, joining in ((0, False), (1, False), (1, True)):
        found = agree(Ranks(result, rank, joining), NodeStore(shm, 'run', f'node{rank}'), rank)
        assert found == secret.given_in({VARIABLE: GIVEN}) and marks_here() == [mark(found)]
    assert not list(shm.rglob('*')), 'nothing is kept that need not be'
    assert not any(found in content or GIVEN.encode() in content for content in contents(result))


def test_generated_secret_lies_on_the_only_node_and_is_never_sent(shm: Path) -> None:
    result, node = store(), NodeStore(shm, 'run', 'a')
    found = agree(Ranks(result, 0), node, 0)
    assert not any(found in content for content in contents(result))
    [file] = [path for path in shm.rglob('*') if path.is_file()]
    assert file.stat().st_mode & 0o777 == 0o600 and file.read_bytes() == found
    assert agree(Ranks(result, 1), node, 1) == found
    with pytest.raises(ConfigurationError, match=VARIABLE):
        agree(Ranks(result, 1), NodeStore(shm, 'run', 'b'), 1)
    again = agree(Ranks(store(), 0), node, 0)
    assert again != found, 'each attempt has its own'
    with pytest.raises(ConfigurationError):
        agree(Ranks(result, 1), node, 1)


@pytest.mark.parametrize(
    'place', [{'GROUP_WORLD_SIZE': '2', 'WORLD_SIZE': '4'}, {'WORLD_SIZE': '2'}]
)
def test_nodes_without_a_given_secret_have_none_in_common(
    shm: Path, monkeypatch: pytest.MonkeyPatch, place: dict[str, str]
) -> None:
    assert secret.closed_between_nodes() is None
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    reason = secret.closed_between_nodes()
    assert reason is not None and VARIABLE in reason and 'openssl rand -hex 32' in reason
    result, node = store(), NodeStore(shm, 'run', 'a')
    first, second = (agree(Ranks(result, rank), node, rank) for rank in (0, 1))
    assert first != second and not list(shm.rglob('*'))
    monkeypatch.setenv('GROUP_WORLD_SIZE', '1')
    assert secret.closed_between_nodes() is None
    monkeypatch.setenv('GROUP_WORLD_SIZE', '2')
    monkeypatch.setenv(VARIABLE, GIVEN)
    assert secret.closed_between_nodes() is None


def test_readable_or_foreign_file_is_no_secret(shm: Path) -> None:
    result, node = store(), NodeStore(shm, 'run', 'a')
    agree(Ranks(result, 0), node, 0)
    file = node.shared / 'secret'
    for harm in (lambda: file.chmod(0o644), lambda: file.write_bytes(b'cut off')):
        harm()
        with pytest.raises(ConfigurationError):
            agree(Ranks(result, 1), node, 1)
        file.chmod(0o600)


def test_full_node_keeps_no_secret_and_says_so_on_all_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / 'run').write_text('in the way')
    result, node = store(), NodeStore(tmp_path, 'run', 'a')
    for rank in (0, 1):
        with pytest.raises(HostMemoryError, match='cannot keep the secret'):
            agree(Ranks(result, rank), node, rank)
    assert 'cannot be kept' in caplog.text


@pytest.mark.parametrize(
    ('first', 'own', 'problem'),
    [
        (GIVEN, GIVEN[::-1], 'of rank 0 is neither in'),
        (GIVEN, '', 'of rank 0 is neither in'),
        ('', GIVEN, 'of rank 0 is neither in'),
        ('', 'short', 'could be guessed'),
    ],
)
def test_other_or_weak_secret_is_refused(
    shm: Path, monkeypatch: pytest.MonkeyPatch, first: str, own: str, problem: str
) -> None:
    monkeypatch.setenv('WORLD_SIZE', '2')
    result, node = store(), NodeStore(shm, 'run', 'a')
    monkeypatch.setenv(VARIABLE, first)
    agree(Ranks(result, 0), node, 0)
    monkeypatch.setenv(VARIABLE, own)
    with pytest.raises(ConfigurationError, match=problem):
        agree(Ranks(result, 1), node, 1)


def test_launchers_give_another_one_each_time_and_slurm_the_same_everywhere() -> None:
    drawn = [secret.variables()[VARIABLE] for _ in range(2)]
    assert drawn[0] != drawn[1]
    at, elsewhere = (secret.variables_of(b'of the launchers') for _ in range(2))
    assert at == elsewhere != secret.variables_of(b'of others')
    for found in (drawn[0], at[VARIABLE]):
        assert secret.given_in({VARIABLE: found}) is not None
    assert b'of the launchers'.hex() not in at[VARIABLE]


def test_secret_of_a_coordinator_of_one_start_is_useless_in_another() -> None:
    """Also if nodes have no secret in common: then it takes the store to know the salt."""
    salts = (b'', b'of this start', b'of another')
    found = {secret.of_coordinator(own, salt) for own in (None, b'own') for salt in salts}
    assert len(found) == 6


@pytest.mark.timeout(120)
def test_nothing_in_the_store_of_a_job_opens_its_memory(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threaded_job.install(monkeypatch)
    keys: list[bytes] = []

    def noted(derive: Callable, own: bytes, *salt: bytes) -> bytes:
        keys.extend([own, derive(own, *salt)])
        return keys[-1]

    for derive in (secret.of_attempt, secret.of_coordinator):
        monkeypatch.setattr(host_memory, derive.__name__, partial(noted, derive))
    job = threaded_job.ThreadedJob(shm, 8)
    job.run()
    found = contents(job._store)
    assert len(keys) == 6 * threaded_job.STAGES and len(set(keys)) == 4  # replicas, coordinators
    assert any(b'salt' in content for content in found), 'the members are among what was read'
    assert not any(
        key in content for key in (*keys, threaded_job.SECRET.encode()) for content in found
    )
