# SPDX-License-Identifier: Apache-2.0
"""Loss of a connection, and loss of the store."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import DistError, TCPStore

from moevement_ext.membership import store_loss
from moevement_ext.membership.store_loss import StoreLoss, StoreLost
from moevement_ext.regroup.waits import in_time
from tests.distributed.harness.ports import free_port
from tests.support.forks import Forked
from tests.unit.membership import ranks
from tests.unit.store.processes import Server

pytestmark = pytest.mark.timed

WAIT_S = 60.0
DUE_S = 20.0
"""Timeout of an event that is due at once."""
TIMEOUT_S = 1.0


def serve(port: int = 0) -> TCPStore:
    with socket.create_server(('127.0.0.1', port), backlog=64) as listening:
        port = listening.getsockname()[1]
        fd = listening.detach()
    return TCPStore('127.0.0.1', port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def client(port: int) -> TCPStore:
    return TCPStore('127.0.0.1', port, is_master=False, timeout=timedelta(seconds=WAIT_S))


Lose = Callable[..., StoreLoss]


@pytest.fixture
def loss_of() -> Iterator[Lose]:
    """Make a `StoreLoss` that is closed at the end."""
    made: list[StoreLoss] = []

    def make(store: TCPStore, timeout_s: float, on_lost: Callable[[], None] = int) -> StoreLoss:
        made.append(StoreLoss(store, timeout_s, on_lost))
        return made[-1]

    yield make
    for loss in made:
        loss.close()


def test_all_connections_identify_the_same_attempt_of_a_store(loss_of: Lose) -> None:
    store = serve()
    losses = [loss_of(client(store.port), WAIT_S) for _ in range(2)]
    assert losses[0].attempt == losses[1].attempt
    assert loss_of(serve(), WAIT_S).attempt != losses[0].attempt
    losses[0].connect().set('key', 'value')
    assert losses[1].reconnect().get('key') == b'value'
    assert not losses[0].lost.is_set()


def test_unreachable_store_is_lost(loss_of: Lose) -> None:
    store = serve()
    called = threading.Event()
    loss = loss_of(client(store.port), 0.2, called.set)
    del store
    with pytest.raises(DistError):
        loss.connect()
    with pytest.raises(StoreLost):
        loss.reconnect()
    assert called.wait(WAIT_S)
    with pytest.raises(DistError, match='the store is lost'):
        loss.connect()


def test_store_is_looked_for_after_an_error_of_this_process(
    loss_of: Lose, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = serve()
    called = threading.Event()
    loss = loss_of(client(store.port), 0.2, called.set)
    errors = [RuntimeError("can't start new thread"), DistError('no connection')]

    def ask(ask: Callable[[], object], limit_s: float) -> object:
        if errors:
            raise errors.pop()
        return in_time(ask, limit_s)

    monkeypatch.setattr(store_loss, 'in_time', ask)
    del store
    with pytest.raises(DistError, match='no connection'):
        loss.connect()
    assert called.wait(DUE_S)


def test_stopped_store_is_found_again_when_it_continues(
    loss_of: Lose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_loss, '_LEAST_TO_ANSWER_S', 0.5)
    server = Server()
    try:
        called = threading.Event()
        loss = loss_of(client(server.port), TIMEOUT_S, called.set)
        server.stand_still()
        with pytest.raises(DistError):
            loss.connect()
        assert called.wait(WAIT_S) and loss.lost.is_set()
        server.go_on()
        deadline = time.monotonic() + WAIT_S
        while loss.lost.is_set():
            assert time.monotonic() < deadline, 'it stays lost'
            time.sleep(0.01)
        assert loss.reconnect().add('counter', 1) == 1
    finally:
        server.close()


def test_another_store_at_the_same_port_is_refused(loss_of: Lose) -> None:
    port = free_port()
    store = serve(port)
    called = threading.Event()
    loss = loss_of(client(port), WAIT_S, called.set)
    del store
    _other = serve(port)
    next_attempt = loss_of(client(port), WAIT_S)
    with pytest.raises(DistError, match='another store'):
        loss.connect()
    assert called.wait(WAIT_S)
    assert not next_attempt.lost.is_set()


def test_rank_without_a_store_leaves_only_if_others_do_not_arrive() -> None:
    """A long wait before the loss of the store does not count, nor do many short waits."""
    port, iterations = free_port(), 10
    store = serve(port)
    rank = Forked(ranks.waits_without_a_store, port, iterations)
    assert rank.stdout.readline() == 'waited for long\n'
    del store
    other = serve(port)
    _, output, _ = rank.end(300.0)
    assert not other.check(['broken/0'])
    assert output.splitlines() == [
        *(f'got to {i}' for i in range(iterations)), 'woken up: True',
    ]  # fmt: skip
