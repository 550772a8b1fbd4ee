# SPDX-License-Identifier: Apache-2.0
"""The first state of a barrier is final, and a waiting rank sends no requests."""

import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import Store, TCPStore

from moevement_ext.membership.counters import close_barrier, has_moved, is_open, open_barrier
from moevement_ext.store_answers import peek

TIMEOUT = timedelta(seconds=60)


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


def soon() -> float:
    return time.monotonic() + TIMEOUT.total_seconds()


def opens(store: Store, barrier: str) -> bool:
    assert has_moved(store, barrier, soon())
    return is_open(peek(store, barrier))


def test_first_state_of_a_barrier_is_final(store: TCPStore) -> None:
    open_barrier(store, 'a')
    close_barrier(store, 'a')
    close_barrier(store, 'b')
    open_barrier(store, 'b')
    assert opens(store, 'a')
    assert not opens(store, 'b')


def test_deleted_barrier_counts_as_closed_and_is_not_recreated(
    store: TCPStore,
) -> None:
    """A process that was stopped for long may read it later."""
    open_barrier(store, 'barrier')
    store.delete_key('barrier')
    assert not is_open(peek(store, 'barrier'))
    assert not store.check(['barrier'])
