# SPDX-License-Identifier: Apache-2.0
"""A stopped store, as a separate process."""

import fcntl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import DistError, HashStore, PrefixStore, Store, TCPStore

from moevement_ext import store_answers as answers
from moevement_ext.config import ConfigurationError
from moevement_ext.regroup.waits import in_time
from moevement_ext.store import connect
from moevement_ext.store_answers import (
    AnswerWatch,
    addresses_of,
    cut_connections,
    peek,
    read_in_parts,
)
from tests.unit.membership.counted_store import CountedStore, Tally
from tests.unit.store.processes import WAIT_S, Server, until

pytestmark = pytest.mark.timed

DUE_S = 20.0
"""Timeout of an event that is due at once."""


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server()) as made:
        yield made


class Asking:
    """A thread that sends a request, and its result."""

    def __init__(self, ask: Callable[[], object]) -> None:
        self._ask = ask
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._ask()
        except Exception as error:
            self.error = error

    def ends_with(self) -> Exception | None:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        return self.error


def test_requests_to_a_stopped_store_raise(server: Server) -> None:
    asking, waiting = (server.connect() for _ in range(2))
    watch = AnswerWatch(asking, 1.0)
    late = Asking(lambda: waiting.wait(['never'], timedelta(days=1)))
    server.stand_still()
    now = Asking(lambda: asking.add('count', 1))
    assert all(isinstance(one.ends_with(), DistError) for one in (late, now))
    server.go_on()
    assert server.connect().add('count', 0) in (0, 1), 'it is the same store'
    watch.close()


def test_a_store_whose_name_was_unknown_at_first_is_cut_off_too(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [addresses_of('localhost', server.port), set()]

    def look_up(host: str, port: int) -> set[str]:
        return found.pop() if len(found) > 1 else found[0]

    monkeypatch.setattr(answers, 'addresses_of', look_up)
    store, waiting_too = (server.connect() for _ in range(2))
    watch = AnswerWatch(store, 0.5)
    waiting = Asking(lambda: waiting_too.wait(['never'], timedelta(days=1)))
    server.stand_still()
    assert isinstance(waiting.ends_with(), DistError)
    watch.close()


def test_long_wait_for_a_responsive_store_is_not_cut(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def counted(ask: Callable[[], object], limit_s: float) -> object:
        asked.append(limit_s)
        return in_time(ask, limit_s)

    monkeypatch.setattr(answers, 'in_time', counted)
    monkeypatch.setattr(answers, '_ASKED_IN_A_LIMIT', 100 * WAIT_S)
    store = server.connect()
    watch = AnswerWatch(store, WAIT_S)
    waiting = Asking(lambda: store.clone().wait(['comes'], timedelta(seconds=WAIT_S)))
    until(lambda: len(asked) > 5)
    assert waiting.thread.is_alive()
    store.set('comes', 'now')
    assert waiting.ends_with() is None
    watch.close()


def test_watch_goes_on_after_an_error_of_this_process(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """First there are too many open files to cut connections, then no thread can be started."""
    errors = [RuntimeError("can't start new thread"), DistError('it is silent')]
    asked = threading.Event()

    def ask(ask: Callable[[], object], limit_s: float) -> object:
        if errors:
            raise errors.pop()
        asked.set()
        return in_time(ask, WAIT_S)

    def cut(addresses: set[str], port: int) -> None:
        raise OSError('Too many open files')

    monkeypatch.setattr(answers, 'in_time', ask)
    monkeypatch.setattr(answers, 'cut_connections', cut)
    watch = AnswerWatch(server.connect(), 0.0)
    assert asked.wait(DUE_S)
    watch.close()
    assert len(caplog.records) == 1


def test_only_connections_to_the_store_are_cut(server: Server) -> None:
    other = Server()
    try:
        spared, cut = other.connect(), server.connect()
        cut_connections(addresses_of('localhost', server.port), server.port)
        assert spared.add('count', 1) == 1
        with pytest.raises(DistError):
            cut.add('count', 1)
        cut_connections(set(), other.port)
        assert spared.add('count', 1) == 2
    finally:
        other.close()


def test_locks_on_files_outlive_a_cut(tmp_path: Path) -> None:
    """A program under training may use POSIX locks, as in SQLite."""
    path = tmp_path / 'locked'
    take = f'import fcntl; fcntl.lockf(open({str(path)!r}, "w"), fcntl.LOCK_EX | fcntl.LOCK_NB)'
    with path.open('w') as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        cut_connections(set(), 1)
        other = subprocess.run([sys.executable, '-c', take], stderr=subprocess.PIPE, text=True)
    assert 'BlockingIOError' in other.stderr


def test_connecting_to_a_stopped_store_times_out(server: Server) -> None:
    server.stand_still()
    connecting = Asking(lambda: connect('127.0.0.1', server.port, timedelta(seconds=1)))
    assert isinstance(connecting.ends_with(), ConfigurationError)


def served() -> TCPStore:
    return TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize(
    'store', [served(), PrefixStore('job/0', served()), HashStore()], ids=['tcp', 'prefix', 'hash']
)
def test_peek_returns_the_value_or_none(store: Store) -> None:
    assert peek(store, 'key') is None
    assert not store.check(['key']), 'a look leaves nothing'
    for value in (b'a value', b'', b'\0\xff'):
        store.set('key', value)  # type: ignore[arg-type]
        assert peek(store, 'key') == value == store.get('key')


def test_many_values_are_read_some_at_a_time() -> None:
    tally, server = Tally(), served()
    keys = [f'key/{index}' for index in range(1000)]
    for key in keys:
        server.set(key, key)
    found = list(read_in_parts(CountedStore(server, tally), keys))
    assert found == [key.encode() for key in keys]
    assert tally.read().requests == 2 * 4
