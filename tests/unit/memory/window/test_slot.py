# SPDX-License-Identifier: Apache-2.0
"""Headers of slots, and the settings of a job in them."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.memory.window import settings
from moevement_ext.memory.window.name import History, WindowName, drawn_history
from moevement_ext.memory.window.settings import RunSettings, differences
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


OWN = RunSettings(
    flags={'--seed': '1234', '--lr': '0.1'},
    layout={'--expert-model-parallel-size': '2'},
    files={'/data/a.idx': '10 sequences'},
    versions={'torch': '2.14.1'},
    environment={'NCCL_ALGO': 'Ring'},
)


@pytest.mark.parametrize(
    ('part', 'table', 'line'),
    [
        ('flags', {'--seed': '4321', '--lr': '0.1'}, '--seed: was 4321, is 1234'),
        ('flags', {'--lr': '0.1'}, '--seed: was absent, is 1234'),
        ('layout', {}, '--expert-model-parallel-size: was absent, is 2'),
        ('files', {'/data/a.idx': '9 sequences'}, '/data/a.idx: was 9 sequences, is 10 sequences'),
    ],
)
def test_differences_that_decide_bits_are_decisive(part: str, table: dict, line: str) -> None:
    other = RunSettings(**{**_parts(OWN), part: table})
    assert differences(other, OWN) == ([line], [])


@pytest.mark.parametrize(
    ('part', 'table', 'line'),
    [
        ('versions', {'torch': '2.15'}, 'torch: rank 3 2.15, rank 0 2.14.1'),
        ('versions', {}, 'torch: rank 3 absent, rank 0 2.14.1'),
        ('environment', {'NCCL_ALGO': 'Tree'}, 'NCCL_ALGO: rank 3 Tree, rank 0 Ring'),
    ],
)
def test_differences_that_may_decide_bits_are_doubtful(part: str, table: dict, line: str) -> None:
    other = RunSettings(**{**_parts(OWN), part: table})
    assert differences(other, OWN, ('rank 3', 'rank 0')) == ([], [line])


@pytest.mark.parametrize(
    'damaged', [b'', b'x', settings.encode(OWN)[:-20], settings.encode(OWN)[4:]]
)
def test_damaged_bytes_are_refused(damaged: bytes) -> None:
    with pytest.raises(ValueError, match='decoded'):
        settings.decode(damaged)


@pytest.mark.parametrize(('files', 'length'), [(0, 5000), (300, 40), (20_000, 70)])
def test_bounded_settings_fit_and_stay_distinguishable(files: int, length: int) -> None:
    noise = random.Random(1)
    long = ''.join(noise.choices('abcdef0123456789', k=length))
    table = {f'/data/{noise.random()}.idx': f'{noise.random()}{long}' for _ in range(files)}
    one = settings.bounded(RunSettings({'--data-path': long}, files=table))
    changed = dict(table) | ({list(table)[-1]: 'other'} if table else {})
    other = settings.bounded(
        RunSettings({'--data-path': long if table else f'{long}x'}, files=changed)
    )
    assert len(settings.encode(one)) <= settings.MAX_BYTES
    assert settings.decode(settings.encode(one)) == one
    assert len(differences(one, other).decisive) == 1


def _parts(of: RunSettings) -> dict:
    return {name: getattr(of, name) for name in RunSettings.__struct_fields__}
