# SPDX-License-Identifier: Apache-2.0
"""The size of unpacked values is bounded, whatever the store holds."""

import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from moevement_ext.membership import exchange
from moevement_ext.membership.exchange import Exchange
from moevement_ext.protect import replanner

LIMIT = 1 << 20
"""Replaces the real limits, which would need as much memory."""
BOMB = zlib.compress(bytes(64 * LIMIT), 9)


@given(st.binary(max_size=2000))
def test_packed_bytes_are_unpacked(content: bytes) -> None:
    assert exchange.unpacked(exchange.packed(content)) == content
    assert exchange.unpacked(exchange.packed(content), len(content)) == content


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_only_value_errors(content: bytes) -> None:
    try:
        exchange.unpacked(content)
    except ValueError:
        pass


def test_truncated_value_is_refused() -> None:
    with pytest.raises(ValueError, match='cut off'):
        exchange.unpacked(exchange.packed(b'some of a report')[:-3])


def readers() -> dict[str, Callable[[TCPStore], object]]:
    """All functions that unpack values of a store, each given a decompression bomb."""

    def left(store: TCPStore) -> object:
        store.set('exchange/some/0/0', (1).to_bytes(4) + BOMB)
        return Exchange(store, joining=True).among('some', b'', [0], None)

    def gathered(store: TCPStore) -> object:
        for rank in range(2):
            store.set(f'join/{rank}', exchange.packed(bytes(LIMIT * 3 // 4)))
        return exchange.gather(store, ['join/0', 'join/1'])

    def handed_out(store: TCPStore) -> object:
        store.set('exchange/reports/0/0', (1).to_bytes(4) + BOMB)
        return exchange.handed_out(store)

    def plan(store: TCPStore) -> object:
        store.set('plan/1', BOMB)
        return replanner.published(store, 1)

    return {
        'exchange': left,
        'all ranks': gathered,
        'one rank': lambda store: exchange.unpacked(BOMB),
        'handed out': handed_out,
        'a plan': plan,
        'plan of a stage': lambda store: replanner.unpacked(BOMB),
    }


@pytest.mark.parametrize('reader', readers())
def test_decompression_bomb_is_refused(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, 'MOST_BYTES', LIMIT)
    monkeypatch.setattr(exchange, 'MOST_BYTES_OF_ALL', LIMIT)
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    with pytest.raises(ValueError, match='more than'):
        readers()[reader](store)
