# SPDX-License-Identifier: Apache-2.0
"""Requests of store clients are decoded as encoded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.store import combining, wire
from moevement_ext.store.wire import Kind, Request

TEXTS = st.binary(max_size=20)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    kind = draw(st.sampled_from(Kind))
    if kind in (Kind.CHECK, Kind.WAIT, Kind.MULTI_GET, Kind.MULTI_SET):
        count = draw(st.integers(0, 4))
    else:
        without = (Kind.VALIDATE, Kind.PING, Kind.NUM_KEYS, Kind.CANCEL_WAIT, Kind.LIST_KEYS)
        count = int(kind not in without)
    values = {Kind.SET: 1, Kind.APPEND: 1, Kind.COMPARE_SET: 2, Kind.MULTI_SET: 1}.get(kind, 0)
    several = st.lists(TEXTS, min_size=count * values, max_size=count * values)
    number = 0
    if kind in (Kind.VALIDATE, Kind.PING):
        number = draw(st.integers(0, 2**32 - 1))
    elif kind == Kind.ADD:
        number = draw(st.integers(-(2**63), 2**63 - 1))
    keys = draw(st.lists(TEXTS, min_size=count, max_size=count))
    return Request(kind, tuple(keys), tuple(draw(several)), number)


def read(sent: bytes) -> list[Request]:
    """All requests in these bytes."""

    received = wire.Incoming()
    received.add(sent)
    found = []
    while received:
        request = received.whole(wire.read_request)
        if request is None:
            raise EOFError
        found.append(request)
    return found


@given(st.lists(requests(), min_size=1, max_size=3))
def test_requests_are_decoded_as_encoded(asked: list[Request]) -> None:
    assert read(b''.join(map(wire.encoded, asked))) == asked


@given(st.lists(requests(), min_size=1, max_size=3), st.lists(st.integers(0, 200)))
def test_split_requests_are_decoded_once_complete(asked: list[Request], cuts: list[int]) -> None:
    sent = b''.join(map(wire.encoded, asked))
    received, found = wire.Incoming(), []
    ends = sorted(cut for cut in cuts if cut < len(sent))
    for begin, end in zip([0, *ends], [*ends, len(sent)], strict=True):
        received.add(sent[begin:end])
        while received and (request := received.whole(wire.read_request)) is not None:
            found.append(request)
    assert found == asked


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(sent: bytes) -> None:
    try:
        read(sent)
    except (ValueError, EOFError):
        pass


def test_excessive_length_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match='beyond'):
        read(bytes([Kind.SET]) + wire.number(1 << 40))


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=6), st.integers(-9, 9))
def test_combined_adds_return_the_numbers_of_single_adds(numbers: list[int], before: int) -> None:
    alone, counter = [], before
    for one in numbers:
        counter += one
        alone.append(counter)
    assert combining.shares(numbers, counter) == alone
