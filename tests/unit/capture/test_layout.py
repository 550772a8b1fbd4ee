# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.capture.layout import (
    OperatorSlices,
    SlotLayout,
    TensorSlice,
    _Copy,
    in_pieces,
    operator_table,
)
from moevement_ext.memory.tensors import copy_all
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import Directory
from moevement_ext.memory.window.slot import ALIGNMENT
from moevement_ext.plan.byte_planner import WindowPlan, balanced

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)


def tensor_slice(
    operator: str,
    part: str,
    count: int,
    dtype: torch.dtype = torch.float32,
    volatile: bool = False,
    value: float = 0,
) -> TensorSlice:
    source = torch.full((count,), value, dtype=dtype)
    return TensorSlice(operator, f'{operator}.weight', part, 0, count, source, volatile)


def operator(name: str, count: int) -> OperatorSlices:
    master = tensor_slice(name, 'master', count, value=1)
    return OperatorSlices(
        full=(master, tensor_slice(name, 'exp_avg', count, value=2)),
        weights=(tensor_slice(name, 'weight', count, torch.bfloat16, value=3),),
    )


OPERATORS = {f'expert{index}': operator(f'expert{index}', 10 + index) for index in range(4)}
PLAN = WindowPlan((('expert0',), ('expert1', 'expert2'), ('expert3',)))


def test_slot_has_full_state_of_its_group_and_weights_of_later_groups() -> None:
    layouts = [SlotLayout(PLAN, slot, OPERATORS) for slot in range(3)]
    assert [layout.full for layout in layouts] == [*PLAN.slots]
    assert [set(layout.weights) for layout in layouts] == [
        {'expert1', 'expert2', 'expert3'},
        {'expert3'},
        set(),
    ]
    parts = [(record.operator, record.part) for record in layouts[1].records]
    assert parts == [
        ('expert1', 'master'),
        ('expert1', 'exp_avg'),
        ('expert2', 'master'),
        ('expert2', 'exp_avg'),
        ('expert3', 'weight'),
    ]


def test_operators_of_other_ranks_are_named_and_take_no_space() -> None:
    layout = SlotLayout(PLAN, 0, {'expert2': OPERATORS['expert2']})
    assert layout.full == ('expert0',)
    assert layout.weights == ('expert1', 'expert2', 'expert3')
    assert [record.operator for record in layout.records] == ['expert2']
    assert layout.payload_bytes == OPERATORS['expert2'].weight_bytes


def test_always_captured_parts_are_in_every_slot_once() -> None:
    always = tensor_slice('expert0', 'scaling', 3, volatile=True)
    operators = OPERATORS | {'expert0': OPERATORS['expert0']._replace(always=(always,))}
    for slot in range(3):
        plain, layout = (SlotLayout(PLAN, slot, each) for each in (OPERATORS, operators))
        parts = [(record.operator, record.part) for record in layout.records]
        assert parts == [
            *((record.operator, record.part) for record in plain.records),
            ('expert0', 'scaling'),
        ]
        bytes_more = layout.payload_bytes - plain.payload_bytes
        assert bytes_more == operators['expert0'].always_bytes == ALIGNMENT


SIZES = st.tuples(st.integers(0, 200), st.sampled_from(DTYPES), st.booleans())


@given(sizes=st.lists(SIZES, max_size=12))
def test_records_are_aligned_and_disjoint(
    sizes: list[tuple[int, torch.dtype, bool]],
) -> None:
    slices = tuple(tensor_slice('a', f'part{index}', *size) for index, size in enumerate(sizes))
    layout = SlotLayout(WindowPlan((('a',),)), 0, {'a': OperatorSlices(slices, ())})
    end = 0
    for record, item in zip(layout.records, slices, strict=True):
        assert record.offset % ALIGNMENT == 0
        assert record.offset >= end
        assert record.nbytes == item.source.numel() * item.source.element_size()
        assert getattr(torch, record.dtype) is item.source.dtype
        end = record.offset + record.nbytes
    assert end <= layout.payload_bytes == OperatorSlices(slices, ()).full_bytes


def test_copies_write_each_tensor_at_the_offset_of_its_record() -> None:
    slices = (
        tensor_slice('a', 'master', 5, value=7),
        tensor_slice('a', 'empty', 0),
        tensor_slice('a', 'buffer', 3, torch.int64, volatile=True, value=9),
    )
    layout = SlotLayout(WindowPlan((('a',),)), 0, {'a': OperatorSlices(slices, ())})
    payload = np.zeros(layout.payload_bytes, np.uint8)
    volatile = layout.copies(payload, volatile=True)
    stable = layout.copies(payload, volatile=False)
    assert [piece.sources for piece in volatile] == [[slices[2].source]]
    assert [piece.sources for piece in stable] == [[slices[0].source]]
    for piece in (*volatile, *stable):
        copy_all(piece.targets, piece.sources)
    for record, item in zip(layout.records, slices, strict=True):
        stored = torch.from_numpy(payload)[record.offset : record.offset + record.nbytes]
        assert torch.equal(stored.view(item.source.dtype), item.source)


def test_views_are_cached_by_file_and_place_up_to_a_bound() -> None:
    layout = SlotLayout(PLAN, 0, OPERATORS)
    size = layout.payload_bytes
    array = np.zeros(64 * size, np.uint8)
    file, other = (WindowFile(Path('window'), array, Directory()) for _ in range(2))
    places = [array[index * size : (index + 1) * size] for index in range(64)]
    first = layout.copies(places[0], False, file=file)
    assert layout.copies(array[:size], False, file=file) is first
    for place in places:
        (piece,) = layout.copies(place, False, file=other)
        assert piece.targets[0].data_ptr() == place.ctypes.data
    assert len(layout._places[False][other]) < 4
    assert layout.copies(places[0], False, file=other) is not first
    assert layout.copies(places[0], False, file=file) is first
    assert layout.copies(places[0], volatile=False) is not first


@given(
    sizes=st.lists(st.integers(1, 60), max_size=8),
    dtype=st.sampled_from(DTYPES),
    limit=st.integers(8, 200),
)
def test_pieces_cover_all_copies_in_order(sizes: list[int], dtype: torch.dtype, limit: int) -> None:
    sources = [torch.arange(1, size + 1).to(dtype) for size in sizes]
    targets = [torch.zeros_like(source) for source in sources]
    pieces = in_pieces(map(_Copy, targets, sources), limit)
    for piece in pieces:
        assert 0 < piece.nbytes == sum(source.nbytes for source in piece.sources) <= limit
        copy_all(piece.targets, piece.sources)
    assert all(torch.equal(*pair) for pair in zip(targets, sources, strict=True))
    starts = [source.data_ptr() for piece in pieces for source in piece.sources]
    wholes = [source.data_ptr() for source in sources]
    assert [start for start in starts if start in wholes] == wholes
    neighbours = zip(pieces, pieces[1:], strict=False)
    assert all(one.nbytes + two.sources[0].nbytes > limit for one, two in neighbours)


@pytest.mark.parametrize('window', [1, 2, 3, 4])
def test_slot_sizes_equal_the_plan(window: int) -> None:
    ranks = [OPERATORS, {'expert1': operator('expert1', 999)}]
    sizes = [
        {name: (slices.full_bytes, slices.weight_bytes) for name, slices in rank.items()}
        for rank in ranks
    ]
    planned = operator_table([*OPERATORS], sizes)
    plan = balanced(planned, window)
    for slot, expected in enumerate(plan.slot_bytes(planned)):
        found = [SlotLayout(plan, slot, rank).payload_bytes for rank in ranks]
        assert expected.tolist() == found
