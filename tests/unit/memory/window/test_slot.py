# SPDX-License-Identifier: Apache-2.0
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.memory.window.slot import (
    SlotContext,
    SlotHeader,
    align_up,
    decode_context,
    decode_frame,
    encode_frame,
    frame_bytes_bound,
    frame_checksum,
)
from tests.unit.memory.samples import make_header


def test_frame_round_trip() -> None:
    header = make_header(1, start=7)
    assert decode_frame(encode_frame(header)) == header


@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_frame_is_detected(position: int, bit: int) -> None:
    frame = bytearray(encode_frame(make_header(0)))
    frame[position % len(frame)] ^= 1 << bit
    with pytest.raises(ValueError, match='checksum'):
        decode_frame(bytes(frame))


@given(cut=st.integers(0, 10**6))
def test_truncated_frame_is_refused(cut: int) -> None:
    frame = encode_frame(make_header(0))
    with pytest.raises(ValueError):
        decode_frame(frame[: cut % len(frame)])


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


@given(st.integers(0, 2**40))
def test_align_up_rounds_to_64_bytes(nbytes: int) -> None:
    assert align_up(nbytes) % 64 == 0
    assert nbytes <= align_up(nbytes) < nbytes + 64


# Context

NAMES = st.lists(st.text(max_size=20), max_size=5)


@given(full=NAMES, weights=NAMES, state=st.binary(max_size=100))
def test_encoded_context_is_decoded(full: list[str], weights: list[str], state: bytes) -> None:
    context = SlotContext(full, weights, state)
    assert decode_context(msgspec.msgpack.encode(context)) == context


@pytest.mark.parametrize('garbage', [b'', b'\x80', msgspec.msgpack.encode({'full': 1})])
def test_garbage_context_is_refused(garbage: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_context(garbage)
