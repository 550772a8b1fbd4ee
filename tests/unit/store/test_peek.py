# SPDX-License-Identifier: Apache-2.0
"""The present value of a key, without a wait or a side effect."""

import pytest
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from moevement_ext.store.answers import peek, read_in_parts
from tests.unit.membership.counted_store import CountedStore, Tally


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


def test_peek_is_one_request() -> None:
    tally = Tally()
    store = CountedStore(served(), tally)
    peek(store, 'key')
    assert tally.read().requests == 1


def test_many_values_are_read_some_at_a_time() -> None:
    """The store serves others in between."""
    tally, server = Tally(), served()
    keys = [f'key/{index}' for index in range(1000)]
    for key in keys:
        server.set(key, key)
    found = list(read_in_parts(CountedStore(server, tally), keys))
    assert found == [key.encode() for key in keys]
    assert tally.read().requests == 2 * 4
