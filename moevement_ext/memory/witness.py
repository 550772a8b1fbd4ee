# SPDX-License-Identifier: Apache-2.0
"""What a rank had captured before a recovery that may be refused, until one is accepted.

A recovery needs the files of windows that are newer than the one it starts from. Their headers have
the checksums by which it is judged, and so are all the others that follow it when it is refused, or
cut off: also by the process after this one, and in the next life of the job. A file beside the
windows, which the plan has room for; where there is no room for it, this process remembers alone.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

from moevement_ext.errors import HostMemoryError
from moevement_ext.memory import private
from moevement_ext.memory.window.slot import SlotHeader

logger = logging.getLogger(__name__)

_CHECKSUM_BYTES = 8
_Headers = msgspec.msgpack.Decoder(list[SlotHeader])


class Witness:
    """Headers of slots of one rank. Training thread only.

    Args:
        path: of the file, in the holder's directory, which is locked.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._headers = _read(path)

    def after(self, start: int) -> list[SlotHeader]:
        """Those of windows that begin after `start`."""
        return [header for header in self._headers if header.start > start]

    def remember(self, headers: Sequence[SlotHeader]) -> None:
        """A recovery begins that is judged by these, and by what is known already."""
        replace = msgspec.structs.replace
        bare = [replace(header, context=b'', settings=b'') for header in headers]
        new = [header for header in bare if header not in self._headers]
        if not new:
            return
        self._headers = new + self._headers  # of two of one state the older counts, the last
        try:
            _write(self._path, msgspec.msgpack.encode(self._headers))
        except (OSError, HostMemoryError) as error:
            logger.warning('only this process remembers what it had captured: %s', error)
            self._path.unlink(missing_ok=True)

    def forget(self) -> None:
        """A recovery is accepted, or the past is not continued."""
        self._headers = []
        self._path.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    new = path.with_name(path.name + '.new')
    new.unlink(missing_ok=True)
    with os.fdopen(private.open_file(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), 'wb') as file:
        file.write(xxhash.xxh3_64_digest(content) + content)
    os.rename(new, path)


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
        logger.warning('%s, what was captured before a recovery, is ignored: %s', path, error)
        return []
