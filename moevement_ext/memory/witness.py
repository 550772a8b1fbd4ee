# SPDX-License-Identifier: Apache-2.0
"""Headers captured before a recovery, kept until a recovery is accepted.

A recovery overwrites the files of windows that are newer than its starting window. The checksums in
their headers decide whether the recovery is accepted. If it is refused or cut off, they judge all
further recoveries, also in the next process and after a restart of the job. So a file beside the
windows keeps the headers (the memory plan includes it); without room for it, they stay in this
process only.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

from moevement_ext.errors import HostMemoryError
from moevement_ext.memory import private
from moevement_ext.memory.window.slot import SlotHeader, decode_context

logger = logging.getLogger(__name__)

_CHECKSUM_BYTES = 8
_Headers = msgspec.msgpack.Decoder(list[SlotHeader])


class Witness:
    """Remembered slot headers of one rank, in a file of its locked directory. Training thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._headers = _read(path)

    def after(self, start: int) -> list[SlotHeader]:
        return [header for header in self._headers if header.start > start]

    def remember(self, headers: Sequence[SlotHeader]) -> None:
        """Add the headers that judge a beginning recovery to those already remembered."""
        bare = [_bare(header) for header in headers]
        new = [header for header in bare if header not in self._headers]
        if not new:
            return
        # For equal states the older header, the later in the list, counts.
        self._headers = new + self._headers
        try:
            _write(self._path, msgspec.msgpack.encode(self._headers))
        except (OSError, HostMemoryError) as error:
            logger.warning('headers of captured slots are kept in this process only: %s', error)
            _unfinished(self._path).unlink(missing_ok=True)  # the earlier headers stay

    def forget(self) -> None:
        """Drop all headers, once a recovery is accepted or the history is abandoned."""
        self._headers = []
        self._path.unlink(missing_ok=True)


def _bare(header: SlotHeader) -> SlotHeader:
    """The header with only the compared part of its context."""
    replace, context = msgspec.structs.replace, b''
    if header.context:
        compared = replace(decode_context(header.context), full=[], weights=[], state=b'')
        context = msgspec.msgpack.encode(compared)
    return replace(header, context=context, settings=b'')


def _write(path: Path, content: bytes) -> None:
    new = _unfinished(path)
    new.unlink(missing_ok=True)
    with os.fdopen(private.open_file(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), 'wb') as file:
        file.write(xxhash.xxh3_64_digest(content) + content)
    os.rename(new, path)


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + '.new')


def _read(path: Path) -> list[SlotHeader]:
    try:
        with os.fdopen(private.open_file(path, os.O_RDONLY), 'rb') as file:
            content = file.read()
        checksum, content = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
        if xxhash.xxh3_64_digest(content) != checksum:
            raise ValueError('it is damaged')
        return _Headers.decode(content)
    except FileNotFoundError:
        return []
    except (OSError, HostMemoryError, ValueError, msgspec.MsgspecError) as error:
        logger.warning('%s, captured before a recovery, is ignored: %s', path, error)
        return []
