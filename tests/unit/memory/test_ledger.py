# SPDX-License-Identifier: Apache-2.0
import math
import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.memory.ledger import (
    MAX_SCALARS,
    PREAMBLE_BYTES,
    RECORD_BYTES,
    Ledger,
    LedgerEntry,
)
from moevement_ext.memory.window.name import RankIdentity
from tests.unit.memory.samples import RUN, TOPOLOGY, identity_of, tmpfs_directory

OWN = identity_of(1)


def entry(iteration: int, grad_norm: float = 1.5, overflow: bool = False) -> LedgerEntry:
    return LedgerEntry(
        iteration=iteration,
        grad_norms=[grad_norm, grad_norm / 2],
        overflows=[overflow, False],
        num_microbatches=8,
        consumed_samples=iteration * 64,
    )


def newest(path: Path) -> LedgerEntry | None:
    return Ledger.read_newest(path, OWN)


@pytest.mark.parametrize(
    'other',
    [
        RankIdentity('flags', TOPOLOGY, 1),
        RankIdentity(RUN, 'layout', 1),
        RankIdentity(RUN, TOPOLOGY, 2),
    ],
)
def test_entries_of_another_run_layout_or_rank_are_not_read(
    other: RankIdentity, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = Ledger(shm / 'ledger', 4, other)
    before.append(entry(1))
    assert newest(shm / 'ledger') is None
    assert 'of another run or layout' in caplog.text
    ledger = Ledger(shm / 'ledger', 4, OWN)
    assert ledger.get(1) is None
    ledger.append(entry(2))
    assert Ledger.read_newest(shm / 'ledger', other) is None
    assert newest(shm / 'ledger') == entry(2)


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(['append', 'forget_after']), st.integers(0, 12)),
        st.just(('open_again', 0)),
    ),
    max_size=20,
)


@given(steps=_STEPS)
def test_ring_keeps_the_last_appended(steps: list[tuple[str, int]]) -> None:
    kept: dict[int, LedgerEntry] = {}  # by region, in the order of the appends
    with tmpfs_directory() as shm:
        path = shm / 'ledger'
        ledger = Ledger(path, 4, OWN)
        inode = path.stat().st_ino
        for number, (step, iteration) in enumerate(steps):
            if step == 'append':
                kept.pop(iteration % 4, None)
                kept[iteration % 4] = entry(iteration, grad_norm=number)
                ledger.append(kept[iteration % 4])
            elif step == 'forget_after':
                ledger.forget_after(iteration)
                kept = {at: one for at, one in kept.items() if one.iteration <= iteration}
            else:
                ledger.close()
                ledger = Ledger(path, 4, OWN)
            assert newest(path) == next(reversed(kept.values()), None)
            held = {one.iteration: one for one in kept.values()}
            assert [ledger.get(number) for number in range(13)] == [*map(held.get, range(13))]
        assert (path.stat().st_ino, path.stat().st_size) == (inode, Ledger.bytes_needed(4))


@pytest.mark.parametrize('torn_at', range(0, RECORD_BYTES, 7))
def test_torn_record_loses_only_itself(shm: Path, torn_at: int) -> None:
    ledger = Ledger(shm / 'ledger', 2, OWN)
    for iteration in (0, 1):
        ledger.append(entry(iteration))
    before = (shm / 'ledger').read_bytes()
    ledger.append(entry(2, grad_norm=9.25, overflow=True))
    after = (shm / 'ledger').read_bytes()
    ledger.close()
    cut = PREAMBLE_BYTES + torn_at
    (shm / 'ledger').write_bytes(after[:cut] + before[cut:])
    torn = Ledger(shm / 'ledger', 2, OWN)
    assert torn.get(1) == entry(1)
    assert newest(shm / 'ledger') in (entry(1), entry(2, grad_norm=9.25, overflow=True))


@pytest.mark.parametrize('garbage', [b'', b'x' * 10, bytes(4096), b'y' * 4096])
def test_garbage_file_is_replaced(
    shm: Path, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (shm / 'ledger').touch(mode=0o600)
    (shm / 'ledger').write_bytes(garbage)
    ledger = Ledger(shm / 'ledger', 4, OWN)
    assert newest(shm / 'ledger') is None
    assert 'no ledger' in caplog.text
    ledger.append(entry(1))
    assert newest(shm / 'ledger') == entry(1)


_FLOATS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True, width=64),
    st.floats(width=32).map(lambda value: struct.unpack('<f', struct.pack('<f', value))[0]),
)
_INTEGERS = st.integers(0, 2**63)


@given(floats=st.tuples(_FLOATS, _FLOATS), integers=st.tuples(_INTEGERS, _INTEGERS, _INTEGERS))
def test_floats_keep_their_bits(floats: tuple[float, ...], integers: tuple[int, int, int]) -> None:
    flags = [True, False]
    written = LedgerEntry(2**60, [*floats], flags, *integers)
    with tmpfs_directory() as shm:
        Ledger(shm / 'ledger', 3, OWN).append(written)
        read = newest(shm / 'ledger')
    assert read is not None
    assert msgspec.structs.replace(read, grad_norms=written.grad_norms) == written
    for before, after in zip(floats, read.grad_norms, strict=True):
        assert struct.pack('<d', before) == struct.pack('<d', after) or math.isnan(before)


def test_up_to_max_scalars_fit_and_more_are_refused(shm: Path) -> None:
    ledger = Ledger(shm / 'ledger', 2, OWN)
    largest = msgspec.structs.replace(
        entry(2**62),
        consumed_samples=2**63,
        num_microbatches=2**32,
        num_tokens=2**63,
        loss=0.1,
        consumed_valid=2**63,
    )
    fitting = msgspec.structs.replace(
        largest, grad_norms=[0.1] * MAX_SCALARS, overflows=[True] * MAX_SCALARS
    )
    ledger.append(fitting)
    assert newest(shm / 'ledger') == fitting
    with pytest.raises(ValueError, match='does not fit'):
        ledger.append(msgspec.structs.replace(largest, grad_norms=[0.1] * 40))
    assert newest(shm / 'ledger') == fitting
    ledger.append(entry(1))
    assert newest(shm / 'ledger') == entry(1)


def test_note_of_a_complete_window_is_one_store(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between two would leave another number."""
    ledger = Ledger(shm / 'ledger', 2, OWN)
    stored = []

    class Map(bytearray):
        def __setitem__(self, place: object, content: object) -> None:
            stored.append((place, content))

    monkeypatch.setattr(ledger, '_map', Map(PREAMBLE_BYTES))
    ledger.note_complete(255)
    assert stored == [(slice(PREAMBLE_BYTES - 8, PREAMBLE_BYTES), (256).to_bytes(8, 'little'))]
