# SPDX-License-Identifier: Apache-2.0
"""Values that ranks leave for joining processes pass through a real store, whatever their size."""

import os
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import PrefixStore, TCPStore

from moevement_ext.membership import exchange
from moevement_ext.membership.exchange import Exchange
from moevement_ext.membership.report import Report, decode_all, encode
from moevement_ext.protect import replanner
from tests.unit.membership.large_job import RANKS_PER_NODE, LargeJob, replacement


@pytest.fixture
def store() -> Iterator[PrefixStore]:
    """The launcher's store, with the prefix of one attempt of the job."""
    server = TCPStore('127.0.0.1', 0, is_master=True, timeout=timedelta(seconds=20))
    yield PrefixStore('job/0', server.clone())


@pytest.fixture
def alone() -> Iterator[None]:
    torch.distributed.init_process_group(
        'gloo', store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize('size', [0, 1, 1 << 20, (9 << 20) + 7])
def test_value_of_any_size_is_read_back(store: PrefixStore, alone: None, size: int) -> None:
    own = os.urandom(size)  # cannot be compressed
    assert Exchange(store)('some', own) == [own]
    assert Exchange(store, joining=True)('some', b'') == [own]


def test_joining_process_gives_its_own_agreement(store: PrefixStore, alone: None) -> None:
    assert Exchange(store).all_agree('reserved', True)
    joining = Exchange(store, joining=True)
    assert joining.all_agree('reserved', True)
    assert not joining.all_agree('reserved', False)


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


WORLD = 4 * RANKS_PER_NODE


def test_equal_parts_of_reports_are_one_object() -> None:
    layout = LargeJob(WORLD)
    reports = [layout.report(rank, 0, 41) for rank in range(WORLD - 1)] + [replacement(WORLD - 1)]
    found = decode_all([encode(report) for report in reports])
    assert found == reports
    assert [msgspec.msgpack.decode(encode(report), type=Report) for report in reports] == found
    of_first_node = found[:RANKS_PER_NODE]
    assert all(report.windows is found[0].windows for report in of_first_node)
    assert found[0].windows != found[RANKS_PER_NODE].windows
