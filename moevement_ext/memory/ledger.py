# SPDX-License-Identifier: Apache-2.0
"""Global scalars of committed iterations, needed for a bit-exact replay.

Gradient norms and overflow flags are reduced across pipeline stages, so a stage that replays alone
cannot recompute them; every rank keeps these scalars in a small mapped ring that survives the
process. Layout: a preamble, then `capacity_records` regions of `RECORD_BYTES`; iteration t is in
region t modulo capacity. Each region has its own checksum, so an append that a kill cuts off loses
only that entry. The preamble has a digest of run, layout and rank: a file that another run left
under the same name may come from other optimizers, and so from other bits.
"""

import mmap
import os
import struct
from pathlib import Path
from typing import Self

import msgspec
import xxhash

from moevement_ext.errors import HostMemoryError
from moevement_ext.logger import logger_of
from moevement_ext.memory import private_file
from moevement_ext.memory.mapped_file import map_anew, map_existing
from moevement_ext.memory.window.name import RankIdentity

logger = logger_of(__name__)

RECORD_BYTES = 256
MAX_SCALARS = 16
"""Number of gradient norms, and of overflow flags, that fit in any record."""
PREAMBLE_BYTES = 64

_MAGIC = b'MoEvLed\0'
_VERSION = 4
_PREAMBLE = struct.Struct('<8sIIQQ')  # magic, version, record bytes, identity digest, records
_COMPLETE = struct.Struct('<Q')  # 1 + start of the newest window that all ranks had; 0: none
_COMPLETE_AT = PREAMBLE_BYTES - _COMPLETE.size
_PREFIX = struct.Struct('<QQQ')  # checksum of the rest, sequence number, entry bytes


class LedgerEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Global scalars that the replay of one iteration needs; floats keep their exact bits."""

    iteration: int
    """Number of committed iterations, this one included."""
    grad_norms: list[float]
    """Gradient norms before clipping, in the order in which the optimizers computed them."""
    overflows: list[bool]
    """Overflow flags, in the order in which the optimizers reduced them."""
    num_microbatches: int
    """Micro-batches of each data-parallel rank."""
    consumed_samples: int
    """Samples consumed up to and including this iteration."""
    num_tokens: int = 0
    """Tokens of the global batch that gradients were divided by; 0 without that division."""
    loss: float | None = None
    """Loss on this rank, None if it has none. Not comparable with other ranks' records."""
    consumed_valid: int | None = None
    """Validation samples consumed before this iteration, which a replay does not evaluate; None if
    the trainer does not count them."""

    def shared(self) -> Self:
        """The entry reduced to the fields that are equal on all ranks."""
        return msgspec.structs.replace(self, loss=None)


_DECODER = msgspec.msgpack.Decoder(LedgerEntry)


class Ledger:
    """A mapped ring of the newest `capacity_records` entries.

    The training thread appends, once per iteration, and reads. A file of an earlier process is
    continued in place, as host memory is planned for one file only; one of another capacity is
    replaced. A process has one object per path. Raises `HostMemoryError` without space.

    Args:
        path: file in the holder's directory (`NodeStore.ledger_path`), which is locked.
        capacity_records: iterations to remember; more than a recovery can ever go back.
        identity: of this rank. Entries of another run or layout are ignored.
    """

    def __init__(self, path: Path, capacity_records: int, identity: RankIdentity) -> None:
        self.path = path
        self.capacity = capacity_records
        self._encoder = msgspec.msgpack.Encoder()
        self._scratch = bytearray(RECORD_BYTES)
        content = _content(path, identity)
        kept = _entries_in(content)
        if len(content) == self.bytes_needed(capacity_records):
            self._map = map_existing(path, writable=True)
            self._sequence = kept[-1][0] + 1 if kept else 0
            return
        nbytes = self.bytes_needed(capacity_records)
        try:
            self._map = map_anew(path, nbytes)
        except private_file.ForeignFileError as error:
            logger.warning('removed: %s', error)
            path.unlink()
            self._map = map_anew(path, nbytes)
        self._map[:] = bytes(nbytes)
        known = _MAGIC, _VERSION, RECORD_BYTES, _digest(identity)
        _PREAMBLE.pack_into(self._map, 0, *known, capacity_records)
        self._sequence = 0

    def append(self, entry: LedgerEntry) -> None:
        """Add one committed iteration. Takes some microseconds, without a system call.

        A repeated iteration (after a rollback) replaces its earlier entry. More norms and
        flags than a record holds raise `ValueError` (`MAX_SCALARS` always fit).
        """
        scratch = self._scratch
        self._encoder.encode_into(entry, scratch, _PREFIX.size)
        size = len(scratch) - _PREFIX.size  # encode_into cuts the buffer after the entry
        if len(scratch) > RECORD_BYTES:
            raise ValueError(f'ledger entry of {size} bytes does not fit in {RECORD_BYTES}')
        _PREFIX.pack_into(scratch, 0, 0, self._sequence, size)
        checksum = xxhash.xxh3_64_intdigest(memoryview(scratch)[8:])
        _PREFIX.pack_into(scratch, 0, checksum, self._sequence, size)
        at = self._region(entry.iteration)
        self._map[at : at + len(scratch)] = scratch
        self._sequence += 1

    def get(self, iteration: int) -> LedgerEntry | None:
        """Entry of an iteration, None if the entry is too old, torn or not yet written."""
        found = _decode(self._map, self._region(iteration))
        return found[1] if found is not None and found[1].iteration == iteration else None

    def entries(self, after: int, to: int) -> list[LedgerEntry]:
        """The available entries of iterations after `after` up to and including `to`."""
        found = [self.get(iteration) for iteration in range(after + 1, to + 1)]
        return [entry for entry in found if entry is not None]

    def note_complete(self, start: int) -> None:
        """Record that all ranks have the window that begins at `start`; any single thread."""
        # In one store: `pack_into` writes byte by byte, and a kill would leave another number.
        self._map[_COMPLETE_AT:PREAMBLE_BYTES] = _COMPLETE.pack(start + 1)

    def forget_after(self, iteration: int) -> None:
        """Drop entries of an abandoned history, at a start or recovery. Takes some milliseconds."""
        if _COMPLETE.unpack_from(self._map, _COMPLETE_AT)[0] > iteration:
            self.note_complete(-1)
        for at in range(PREAMBLE_BYTES, self.bytes_needed(self.capacity), RECORD_BYTES):
            found = _decode(self._map, at)
            if found is not None and found[1].iteration > iteration:
                self._map[at : at + RECORD_BYTES] = bytes(RECORD_BYTES)

    @staticmethod
    def read_newest(path: Path, identity: RankIdentity) -> LedgerEntry | None:
        """The newest entry of a file, without taking the file over; None if there is none."""
        kept = _entries_in(_content(path, identity))
        return kept[-1][1] if kept else None

    @staticmethod
    def read_complete(path: Path, identity: RankIdentity) -> int | None:
        """Start of the newest window that all ranks had, -1 if the file records none.

        None if no earlier process of this run, layout and rank left the file.
        """
        content = _content(path, identity)
        return _COMPLETE.unpack_from(content, _COMPLETE_AT)[0] - 1 if content else None

    def close(self) -> None:
        self._map.close()

    @staticmethod
    def bytes_needed(capacity_records: int) -> int:
        return PREAMBLE_BYTES + capacity_records * RECORD_BYTES

    def _region(self, iteration: int) -> int:
        return PREAMBLE_BYTES + (iteration % self.capacity) * RECORD_BYTES


def _entries_in(content: bytes) -> list[tuple[int, LedgerEntry]]:
    """Sequence numbers and entries of an earlier process, in the order of the appends."""
    regions = range(PREAMBLE_BYTES, len(content) - RECORD_BYTES + 1, RECORD_BYTES)
    found = [item for at in regions if (item := _decode(content, at)) is not None]
    return sorted(found, key=lambda item: item[0])


def _content(path: Path, identity: RankIdentity) -> bytes:
    known = (_MAGIC, _VERSION, RECORD_BYTES)
    try:
        with os.fdopen(private_file.open_file(path, os.O_RDONLY), 'rb') as file:
            content = file.read()
        if len(content) < PREAMBLE_BYTES or _PREAMBLE.unpack_from(content)[:3] != known:
            logger.warning('%s is no ledger of this format; its entries are ignored', path)
        elif _PREAMBLE.unpack_from(content)[3] != _digest(identity):
            logger.warning('%s is of another run or layout; its entries are ignored', path)
        else:
            return content
    except FileNotFoundError:
        pass
    except (HostMemoryError, OSError) as error:
        logger.warning('the entries of an earlier ledger are ignored: %s', error)
    return b''


def _digest(identity: RankIdentity) -> int:
    whose = msgspec.msgpack.encode((identity.run, identity.topology, identity.rank))
    return xxhash.xxh3_64_intdigest(whose)


def _decode(content: bytes | mmap.mmap, at: int) -> tuple[int, LedgerEntry] | None:
    """Sequence number and entry of the record at offset `at`, None if the record is torn."""
    record = content[at : at + RECORD_BYTES]
    checksum, sequence, size = _PREFIX.unpack_from(record)
    end = _PREFIX.size + size
    if not _PREFIX.size < end <= RECORD_BYTES:
        return None
    if xxhash.xxh3_64_intdigest(record[8:end]) != checksum:
        return None
    try:
        return sequence, _DECODER.decode(record[_PREFIX.size : end])
    except msgspec.MsgspecError:
        return None
