# SPDX-License-Identifier: Apache-2.0
"""Global scalars of committed iterations, needed to replay them with the same bits.

Gradient norms and overflow flags are reduced across pipeline stages, so a stage that replays alone
cannot compute them again; every rank keeps them in a small mapped ring that survives
the process. Layout: a preamble, then ``capacity_records`` regions of ``RECORD_BYTES``; iteration t
is in region t modulo capacity. Each region has its own checksum, so an append that was cut off by a
kill loses that one entry and no other.
"""

import logging
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from moevement_ext.memory import private
from moevement_ext.memory.budget import HostMemoryError, preallocate

logger = logging.getLogger(__name__)

RECORD_BYTES = 256
PREAMBLE_BYTES = 64

_MAGIC = b'MoEvLed\0'
_VERSION = 1
_PREAMBLE = struct.Struct('<8sIIQ')  # magic, version, record bytes, capacity in records
_PREFIX = struct.Struct('<QQQ')  # checksum of the rest, sequence number, entry bytes


class LedgerEntry(msgspec.Struct, frozen=True, array_like=True):
    """What iteration ``iteration`` needs to be replayed; floats keep their exact bits."""

    iteration: int
    grad_norms: list[float]
    """Gradient norms before clipping, in the order in which the optimizers computed them."""
    overflows: list[bool]
    """Overflow flags, in the order in which the optimizers reduced them."""
    skipped: bool
    """The update was skipped (overflow); a replay skips it too."""
    num_microbatches: int
    """Micro-batches of each data-parallel rank."""
    consumed_samples: int
    """Samples consumed up to and with this iteration."""
    scheduler_steps: int
    learning_rate: float
    weight_decay: float
    num_tokens: int = 0
    """Tokens of the global batch that gradients were divided by; 0 where they were not."""


class Ledger:
    """A mapped ring of the newest ``capacity_records`` entries.

    One thread appends (the training thread, once per iteration); recovery reads. If the file
    exists its entries move to a new file, also when the capacity differs, so a process has one
    object per path.

    Args:
        path: file in the holder's directory (``NodeStore.ledger_path``), which is locked.
        capacity_records: iterations to remember; more than a recovery can ever go back.

    Raises:
        HostMemoryError: no space for the file.
    """

    def __init__(self, path: Path, capacity_records: int) -> None:
        if capacity_records < 1:
            raise ValueError(f'a ledger of {capacity_records} records remembers nothing')
        self.path = path
        self.capacity = capacity_records
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(LedgerEntry)
        self._scratch = bytearray(RECORD_BYTES)
        kept = self._read_existing()
        self._map = self._create()
        self._sequence = 0
        for entry in kept:
            self.append(entry)
        os.rename(self._new_path, self.path)  # the old file is whole until all is in the new one

    def append(self, entry: LedgerEntry) -> None:
        """Add one committed iteration; some microseconds, no system call.

        An iteration entered again (after a rollback) replaces the earlier entry.

        Raises:
            ValueError: more norms and flags than a record holds (16 of each always fit).
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

    @classmethod
    def read_newest(cls, path: Path) -> LedgerEntry | None:
        """Return the newest entry of a file without taking it over, None if there is none."""
        reader = cls.__new__(cls)
        reader.path = path
        reader._decoder = msgspec.msgpack.Decoder(LedgerEntry)
        kept = reader._read_existing()
        return kept[-1] if kept else None

    def newest(self) -> LedgerEntry | None:
        """Return the entry appended last that is whole, None if there is none."""
        entries = [entry for _, entry in self._valid(self._map)]
        return entries[-1] if entries else None

    def get(self, iteration: int) -> LedgerEntry | None:
        """Return the entry of an iteration, None if it is too old, torn or not yet there."""
        found = self._decode(self._map, self._region(iteration))
        return found[1] if found is not None and found[1].iteration == iteration else None

    def rewind(self, iteration: int) -> None:
        """Forget all entries after ``iteration``, when training resumes from an older state."""
        for _, entry in self._valid(self._map):
            if entry.iteration > iteration:
                at = self._region(entry.iteration)
                self._map[at : at + RECORD_BYTES] = bytes(RECORD_BYTES)

    def close(self) -> None:
        """Unmap; the file stays."""
        self._map.close()

    @staticmethod
    def bytes_needed(capacity_records: int) -> int:
        """Return the size of the file in bytes."""
        return PREAMBLE_BYTES + capacity_records * RECORD_BYTES

    @property
    def _new_path(self) -> Path:
        return self.path.with_name(self.path.name + '.new')

    def _region(self, iteration: int) -> int:
        return PREAMBLE_BYTES + (iteration % self.capacity) * RECORD_BYTES

    def _create(self) -> mmap.mmap:
        size = self.bytes_needed(self.capacity)
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._new_path.unlink(missing_ok=True)  # left by a process that was killed here
        fd = private.open_file(self._new_path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            preallocate(fd, size, self._new_path)
            ring = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(fd)
        _PREAMBLE.pack_into(ring, 0, _MAGIC, _VERSION, RECORD_BYTES, self.capacity)
        return ring

    def _read_existing(self) -> list[LedgerEntry]:
        """Return the entries of an earlier process, in the order in which they were appended."""
        try:
            with os.fdopen(private.open_file(self.path, os.O_RDONLY), 'rb') as file:
                content = file.read()
        except FileNotFoundError:
            return []
        except (HostMemoryError, OSError) as error:
            logger.warning('the entries of an earlier ledger are ignored: %s', error)
            return []
        if len(content) < PREAMBLE_BYTES or _PREAMBLE.unpack_from(content)[:3] != (
            _MAGIC,
            _VERSION,
            RECORD_BYTES,
        ):
            logger.warning('%s is no ledger of this format; its entries are ignored', self.path)
            return []
        return [entry for _, entry in self._valid(content)]

    def _valid(self, content: bytes | mmap.mmap) -> list[tuple[int, LedgerEntry]]:
        """Return (sequence number, entry) of all whole records, oldest append first."""
        found = (self._decode(content, at) for at in _regions(len(content)))
        return sorted((item for item in found if item is not None), key=lambda item: item[0])

    def _decode(self, content: bytes | mmap.mmap, at: int) -> tuple[int, LedgerEntry] | None:
        record = content[at : at + RECORD_BYTES]
        checksum, sequence, size = _PREFIX.unpack_from(record)
        end = _PREFIX.size + size
        if size == 0 or end > RECORD_BYTES:
            return None
        if xxhash.xxh3_64_intdigest(record[8:end]) != checksum:
            return None
        try:
            return sequence, self._decoder.decode(record[_PREFIX.size : end])
        except msgspec.MsgspecError:
            return None


def _regions(size: int) -> Iterator[int]:
    return iter(range(PREAMBLE_BYTES, size - RECORD_BYTES + 1, RECORD_BYTES))
