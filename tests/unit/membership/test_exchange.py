# SPDX-License-Identifier: Apache-2.0
"""Values that ranks leave for joining processes pass through a real store, whatever their size."""

import os
from collections.abc import Iterator
from datetime import timedelta

import msgspec
import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from megatron.moevement.seams import cpu_device

cpu_device.install()

from moevement_ext.membership.exchange import Exchange, leave  # noqa: E402
from moevement_ext.protect.planner import _RankOperators  # noqa: E402

RANKS = 300
LAYERS, LOCAL_EXPERTS = 16, 64


@pytest.fixture
def store() -> Iterator[PrefixStore]:
    """The launcher's store, with the prefix of one attempt of the job."""
    server = TCPStore('127.0.0.1', 0, is_master=True, timeout=timedelta(seconds=20))
    yield PrefixStore('job/0', server.clone())


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one rank."""
    torch.distributed.init_process_group(
        'gloo', store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def _operators(rank: int) -> bytes:
    names = [
        f'layer{layer}.expert{rank * LOCAL_EXPERTS + expert}'
        for layer in range(LAYERS)
        for expert in range(LOCAL_EXPERTS)
    ]
    sizes = {name: (123_456_789 + index, 12_345_678) for index, name in enumerate(names)}
    kinds = dict.fromkeys(names, 'expert')
    return msgspec.msgpack.encode(_RankOperators(sizes, kinds, tied=[], always=0))


def test_joining_process_reads_operators_of_hundreds_of_ranks(store: PrefixStore) -> None:
    left = {rank: _operators(rank) for rank in range(RANKS)}
    assert sum(map(len, left.values())) > 8 << 20, 'more than one value of the store holds'
    for rank, own in left.items():
        leave(store, 'operators', rank, own)
    stage = range(128, 256)
    joining = Exchange(store, joining=True)
    assert joining.among('operators', b'', stage, None) == [left[rank] for rank in stage]


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
