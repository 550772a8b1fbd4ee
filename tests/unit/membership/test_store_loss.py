# SPDX-License-Identifier: Apache-2.0
"""A connection that is lost, and a store that is."""

import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import DistError, TCPStore

from moevement_ext.membership.store_loss import StoreLoss, StoreLost

WAIT_S = 60.0
PATIENCE_S = 1.0


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
    """Makes a `StoreLoss` that is closed at the end."""
    made: list[StoreLoss] = []

    def make(store: TCPStore, patience_s: float, on_lost: Callable[[], None] = int) -> StoreLoss:
        made.append(StoreLoss(store, patience_s, on_lost))
        return made[-1]

    yield make
    for loss in made:
        loss.close()


def test_all_know_the_same_life_of_a_store(loss_of: Lose) -> None:
    store = serve()
    losses = [loss_of(client(store.port), PATIENCE_S) for _ in range(2)]
    assert losses[0].life == losses[1].life
    assert loss_of(serve(), PATIENCE_S).life != losses[0].life
    losses[0].connect().set('key', 'value')
    assert losses[1].reconnect().get('key') == b'value'
    assert not losses[0].lost.is_set()


def test_store_that_stays_out_of_reach_is_lost(loss_of: Lose) -> None:
    store = serve()
    called = threading.Event()
    loss = loss_of(client(store.port), PATIENCE_S, called.set)
    del store
    with pytest.raises(DistError):
        loss.connect()
    with pytest.raises(StoreLost):
        loss.reconnect()
    assert called.wait(WAIT_S)
    with pytest.raises(DistError, match='the store is lost'):
        loss.connect()


def test_another_store_in_its_place_is_not_taken_for_it(loss_of: Lose) -> None:
    """Not even when those of the next life have met there."""
    store = serve()
    called = threading.Event()
    loss = loss_of(client(store.port), WAIT_S, called.set)
    port = store.port
    del store
    other = serve(port)
    next_life = loss_of(client(port), WAIT_S)
    with pytest.raises(DistError, match='another store'):
        loss.connect()
    assert called.wait(WAIT_S)
    assert not next_life.lost.is_set()
    assert not other.check(['broken/0'])


def test_a_connection_that_is_lost_is_not_the_end(loss_of: Lose) -> None:
    store = serve()
    loss = loss_of(client(store.port), WAIT_S)
    hung = loss._store.clone
    attempts: list[object] = []

    def failing() -> TCPStore:
        attempts.append(1)
        if len(attempts) == 1:
            raise DistError('once')
        return hung()

    loss._store = type('Flaky', (), {'clone': staticmethod(failing)})()
    with pytest.raises(DistError, match='once'):
        loss.connect()
    assert loss.reconnect().check([]) is not None
    assert not loss.lost.is_set()
