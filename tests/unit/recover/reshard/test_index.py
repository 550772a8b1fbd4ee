# SPDX-License-Identifier: Apache-2.0
"""Ranges of one layout cover those of any other: every element once, from its own place."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.memory.window.slot import Record, SlotHeader
from moevement_ext.recover.reshard.index import Division, Portion, SlotIndex, Wanted

SIZE = 4
NAMES = ('one', 'two')


def header(owner: int, *records: Record) -> SlotHeader:
    return SlotHeader(3, 'run', 'layout', owner, 0, 1, 0, 0, 'plan', 0, list(records))


def record(tensor: str, start: int, end: int, part: str = 'master', checksum: int = 0) -> Record:
    return Record(
        operator='layer1.rest',
        tensor=tensor,
        part=part,
        dtype='float32',
        start=start,
        end=end,
        offset=0,
        nbytes=SIZE * (end - start),
        checksum=checksum,
    )


def index_of(headers: Sequence[SlotHeader]) -> SlotIndex:
    index = SlotIndex(lambda operator, tensor, owner: tensor.removeprefix(f'rank{owner}.'))
    for one in headers:
        index.add(one)
    return index


def need(start: int, end: int, name: str = 'one', volatile: bool = False) -> Wanted:
    return Wanted(name, 'master', 'float32', start, end, SIZE * (end - start), volatile)


cuts = st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True).map(
    lambda inner: [0, *sorted(set(inner) - {0, 40}), 40]
)


@given(cuts, cuts, st.lists(st.integers(0, 5), min_size=7, max_size=7), st.integers(1, 3))
def test_every_element_is_read_once_from_its_place(
    old: list[int], new: list[int], owners: list[int], copies: int
) -> None:
    spans = list(zip(old, old[1:], strict=False))
    held = {
        owner: [
            record(f'rank{owner}.one', start, end)
            for number, (start, end) in enumerate(spans)
            if owner in [(owners[number] + copy) % 6 for copy in range(copies)]
        ]
        for owner in range(6)
    }
    index = index_of([header(owner, *records) for owner, records in held.items()])
    for start, end in zip(new, new[1:], strict=False):
        came: list[int] = []
        for piece in index.pieces(need(start, end), lambda owner: (owner - 2) % 6):
            assert piece.at == SIZE * len(came)
            source = held[piece.owner][piece.record]
            assert 0 <= piece.begin < piece.end <= source.nbytes
            came += range(source.start + piece.begin // SIZE, source.start + piece.end // SIZE)
        assert came == list(range(start, end))


def test_the_nearest_of_equal_owners_is_read() -> None:
    index = index_of([header(owner, record(f'rank{owner}.one', 0, 8)) for owner in range(3)])
    assert [*index.pieces(need(2, 6), lambda owner: abs(owner - 1))] == [Portion(1, 0, 8, 24, 0)]


def test_a_gap_is_named() -> None:
    index = index_of([header(0, record('one', 0, 4)), header(1, record('one', 5, 8))])
    with pytest.raises(
        RefusedWindow, match=r'no rank holds one \(master, float32\) from element 4'
    ):
        [*index.pieces(need(0, 8), lambda owner: owner)]


def test_owners_that_contradict_each_other_are_named() -> None:
    index = index_of([header(owner, record('one', 0, 4, checksum=owner)) for owner in range(2)])
    with pytest.raises(RefusedWindow, match='ranks 0 and 1 hold different bytes of one'):
        [*index.pieces(need(0, 4), lambda owner: owner)]
    assert len([*index.pieces(need(0, 4, volatile=True), lambda owner: owner)]) == 1


@given(cuts, st.sampled_from([1, 2, 5]), st.sampled_from([1, 2, 5]))
def test_shards_are_divided_anew(old: list[int], before: int, after: int) -> None:
    columns = 10
    whole = [range(columns * row, columns * (row + 1)) for row in range(4)]

    def elements(shard: int, shards: int) -> list[int]:
        width = columns // shards
        return [at for row in whole for at in row[width * shard : width * (shard + 1)]]

    def divided(record: Record, owner: int) -> Division:
        return Division(columns // before, before, owner)

    index = SlotIndex(lambda operator, tensor, owner: tensor, divided)
    held = {
        shard: [
            record('one', start, end, checksum=shard)
            for start, end in zip(old, old[1:], strict=False)
            if end <= 40 // before
        ]
        for shard in range(before)
    }
    for shard, records in held.items():
        covered = records[-1].end if records else 0
        rest = [record('one', covered, 40 // before)] if covered < 40 // before else []
        held[shard] = [*records, *rest]
        index.add(header(shard, *held[shard]))
    for shard in range(after):
        came = []
        for start, end in Division(columns // after, after, shard).ranges(0, 40 // after):
            for piece in index.pieces(need(start, end), lambda owner: owner):
                source = held[piece.owner][piece.record]
                first = source.start + piece.begin // SIZE
                count = (piece.end - piece.begin) // SIZE
                came += elements(piece.owner, before)[first : first + count]
        assert came == elements(shard, after)
