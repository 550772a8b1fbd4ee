# SPDX-License-Identifier: Apache-2.0
"""Global scalars of committed iterations, needed to replay them with the same bits.

Gradient norms and overflow flags are reduced across pipeline stages, so a stage that replays alone
cannot compute them again; every rank keeps them in a small mapped ring that survives
the process. Layout: a preamble, then `capacity_records` regions of `RECORD_BYTES`; iteration t
is in region t modulo capacity. Each region has its own checksum, so an append that was cut off by a
kill loses that one entry and no other. The preamble has a digest of run, layout and rank: what
another run left under the same name may be of other optimizers, and of other bits.
"""

import logging
import mmap
import os
import struct
from pathlib import Path
from typing import Self

import msgspec
import xxhash

from moevement_ext.errors import HostMemoryError
from moevement_ext.memory import private
from moevement_ext.memory.mapped import map_anew, map_existing
from moevement_ext.memory.window.name import RankIdentity

logger = logging.getLogger(__name__)

RECORD_BYTES = 256
MAX_SCALARS = 16
"""Gradient norms, and as many overflow flags, for which a record always has room."""
PREAMBLE_BYTES = 64

_MAGIC = b'MoEvLed\0'
_VERSION = 3
_PREAMBLE = struct.Struct('<8sIIQQ')  # magic, version, record bytes, whose, capacity in records
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
    """Samples consumed up to and with this iteration."""
    num_tokens: int = 0
    """Tokens of the global batch that gradients were divided by; 0 where they were not."""
    loss: float | None = None
    """This rank's own, None if it has none: what others recorded says nothing of its replay."""
    judges: bool = True
    """A replay must come to the same; False if it was written by one that was itself on trial."""

    def shared(self) -> Self:
        """What all ranks have alike."""
        return msgspec.structs.replace(self, loss=None, judges=True)

    def on_trial(self) -> Self:
        """What a replay left that is still to be judged."""
        return msgspec.structs.replace(self, judges=False)


_DECODER = msgspec.msgpack.Decoder(LedgerEntry)


class Ledger:
    """A mapped ring of the newest `capacity_records` entries.

    The training thread appends, once per iteration, and reads. A file of an earlier process is
    written on in place: host memory is planned for one, and a restart finds no room for another.
    Where the capacity differs its entries are written anew. A process has one object per path.

    Args:
        path: file in the holder's directory (`NodeStore.ledger_path`), which is locked.
        capacity_records: iterations to remember; more than a recovery can ever go back.
        identity: whose it is. What an earlier process of another run or layout left is not read.

    Raises:
        HostMemoryError: no space for the file.
    """

    def __init__(self, path: Path, capacity_records: int, identity: RankIdentity) -> None:
        if capacity_records < 1:
            raise ValueError(f'a ledger of {capacity_records} records remembers nothing')
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
        self._map = _map_empty(path, self.bytes_needed(capacity_records))
        known = _MAGIC, _VERSION, RECORD_BYTES, _digest(identity)
        _PREAMBLE.pack_into(self._map, 0, *known, capacity_records)
        self._sequence = 0
        for _, entry in kept:
            self.append(entry)

    def append(self, entry: LedgerEntry) -> None:
        """Add one committed iteration; some microseconds, no system call.

        An iteration entered again (after a rollback) replaces the earlier entry.

        Raises:
            ValueError: more norms and flags than a record holds (`MAX_SCALARS` always fit).
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
        """Entry of an iteration, None if it is too old, torn or not yet there."""
        found = _decode(self._map, self._region(iteration))
        return found[1] if found is not None and found[1].iteration == iteration else None

    def entries(self, after: int, to: int) -> list[LedgerEntry]:
        """Those of the iterations after `after` up to `to`, as far as they are here."""
        found = [self.get(iteration) for iteration in range(after + 1, to + 1)]
        return [entry for entry in found if entry is not None]

    def note_complete(self, start: int) -> None:
        """All ranks have the window that begins with iteration `start`. Any one thread."""
        _COMPLETE.pack_into(self._map, _COMPLETE_AT, start + 1)

    def forget_after(self, iteration: int) -> None:
        """Drop what is of later iterations: it belongs to a past that is not continued.

        Some milliseconds; for the begin of a life or of a recovery.
        """
        if _COMPLETE.unpack_from(self._map, _COMPLETE_AT)[0] > iteration:
            self.note_complete(-1)
        for at in range(PREAMBLE_BYTES, self.bytes_needed(self.capacity), RECORD_BYTES):
            found = _decode(self._map, at)
            if found is not None and found[1].iteration > iteration:
                self._map[at : at + RECORD_BYTES] = bytes(RECORD_BYTES)

    @staticmethod
    def read_newest(path: Path, identity: RankIdentity) -> LedgerEntry | None:
        """Entry that was appended last to a file, which is not taken over; None if it has none."""
        kept = _entries_in(_content(path, identity))
        return kept[-1][1] if kept else None

    @staticmethod
    def is_of(path: Path, identity: RankIdentity) -> bool:
        """An earlier process of this run, layout and rank has left a file."""
        return bool(_content(path, identity))

    @staticmethod
    def read_complete(path: Path, identity: RankIdentity) -> int:
        """Start of the newest window that all ranks had, -1 if a file tells of none."""
        content = _content(path, identity)
        return _COMPLETE.unpack_from(content, _COMPLETE_AT)[0] - 1 if content else -1

    def close(self) -> None:
        """Unmap; the file stays."""
        self._map.close()

    @staticmethod
    def bytes_needed(capacity_records: int) -> int:
        """Size of the file in bytes."""
        return PREAMBLE_BYTES + capacity_records * RECORD_BYTES

    def _region(self, iteration: int) -> int:
        return PREAMBLE_BYTES + (iteration % self.capacity) * RECORD_BYTES


def _map_empty(path: Path, nbytes: int) -> mmap.mmap:
    """A file of zeros, in the place of what is there."""
    try:
        mapped = map_anew(path, nbytes)
    except private.ForeignFileError as error:
        logger.warning('removed: %s', error)
        path.unlink()
        mapped = map_anew(path, nbytes)
    mapped[:] = bytes(nbytes)
    return mapped


def _entries_in(content: bytes) -> list[tuple[int, LedgerEntry]]:
    """What an earlier process has left: sequence numbers and entries, as they were appended."""
    regions = range(PREAMBLE_BYTES, len(content) - RECORD_BYTES + 1, RECORD_BYTES)
    found = [item for at in regions if (item := _decode(content, at)) is not None]
    return sorted(found, key=lambda item: item[0])


def _content(path: Path, identity: RankIdentity) -> bytes:
    """All of a ledger of this run, layout and rank; empty if there is none."""
    try:
        with os.fdopen(private.open_file(path, os.O_RDONLY), 'rb') as file:
            content = file.read()
    except FileNotFoundError:
        return b''
    except (HostMemoryError, OSError) as error:
        logger.warning('the entries of an earlier ledger are ignored: %s', error)
        return b''
    known = (_MAGIC, _VERSION, RECORD_BYTES)
    if len(content) < PREAMBLE_BYTES or _PREAMBLE.unpack_from(content)[:3] != known:
        logger.warning('%s is no ledger of this format; its entries are ignored', path)
        return b''
    if _PREAMBLE.unpack_from(content)[3] != _digest(identity):
        logger.warning('%s is of another run or layout; its entries are ignored', path)
        return b''
    return content


def _digest(identity: RankIdentity) -> int:
    whose = msgspec.msgpack.encode((identity.run, identity.topology, identity.rank))
    return xxhash.xxh3_64_intdigest(whose)


def _decode(content: bytes | mmap.mmap, at: int) -> tuple[int, LedgerEntry] | None:
    """Sequence number and entry of the record that begins at `at`, None if it is not whole."""
    record = content[at : at + RECORD_BYTES]
    checksum, sequence, size = _PREFIX.unpack_from(record)
    end = _PREFIX.size + size
    if size == 0 or end > RECORD_BYTES:
        return None
    if xxhash.xxh3_64_intdigest(record[8:end]) != checksum:
        return None
    try:
        return sequence, _DECODER.decode(record[_PREFIX.size : end])
    except msgspec.MsgspecError:
        return None
