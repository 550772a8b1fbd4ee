# SPDX-License-Identifier: Apache-2.0
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.memory.window.name import History, Window, WindowName, drawn_history
from moevement_ext.memory.window.slot import (
    SlotHeader,
    decode_frame,
    encode_frame,
    frame_bytes_bound,
    frame_checksum,
)
from tests.unit.memory.samples import make_header


@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_frame_is_detected(position: int, bit: int) -> None:
    frame = bytearray(encode_frame(make_header(0)))
    frame[position % len(frame)] ^= 1 << bit
    with pytest.raises(ValueError, match='checksum'):
        decode_frame(bytes(frame))


def test_frame_checksum_identifies_content() -> None:
    header = make_header(0)
    other = msgspec.structs.replace(header, context=b'another state')
    assert frame_checksum(encode_frame(header)) == frame_checksum(encode_frame(header))
    assert frame_checksum(encode_frame(header)) != frame_checksum(encode_frame(other))


_LARGEST = 2**64 - 1


@given(iteration=st.integers(0, _LARGEST), checksum=st.integers(0, _LARGEST))
def test_bound_holds_for_any_iteration_and_checksum(iteration: int, checksum: int) -> None:
    blank = make_header(0)
    records = [msgspec.structs.replace(r, checksum=checksum) for r in blank.records]
    sealed: SlotHeader = msgspec.structs.replace(
        blank, records=records, start=iteration, iteration=iteration, payload_bytes=iteration
    )
    assert len(encode_frame(sealed)) <= frame_bytes_bound(blank)


# Context

NAMES = st.lists(st.text(max_size=20), max_size=5)


def test_window_is_dense_at_its_last_slot() -> None:
    window = Window(WindowName(4, 'plan'), 3)
    assert (window.start, window.dense_at) == (4, 6)


def test_a_history_includes_its_windows_and_what_led_to_its_base() -> None:
    first = History(drawn_history())
    base, later = first.window(4, 'plan'), first.window(6, 'plan')
    second = first.after(base)
    third = second.after(second.window(5, 'plan'))
    assert second == first.after(base) and first.name < second.name < third.name
    assert second != first.after(later), 'another base, another history'
    assert (base.history, second.window(4, 'plan').history) == (first.name, second.name)
    assert first.includes(base) and first.includes(later)
    assert second.includes(base) and second.includes(first.window(2, 'plan'))
    assert not second.includes(later), 'abandoned when all stages went back'
    assert not third.includes(base), 'its own base is what it goes back to'
    assert not History(drawn_history()).includes(base)


def test_decoded_names_are_validated() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode((4, 'plan')), type=WindowName) == (
        WindowName(4, 'plan')
    )
    for foreign in ((-1, 'plan'), (4,), (4, 5), ('4', 'plan')):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(foreign), type=WindowName)
