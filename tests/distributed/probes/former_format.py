# SPDX-License-Identifier: Apache-2.0
"""Workers that write windows as the release before this one did: format version 2."""

from msgspec import UNSET
from msgspec.structs import replace

from moevement_ext.memory.window import file as window_file
from moevement_ext.memory.window import format as window_format
from moevement_ext.memory.window.slot import SlotHeader, encode_frame

VERSION = 2


def write() -> None:
    """In a worker, before it captures. `tests/unit/memory/window/test_file.py` has the bytes."""

    def encode(header: SlotHeader) -> bytes:
        return encode_frame(replace(header, version=VERSION, placed=UNSET))

    window_format.FORMAT_VERSION = VERSION  # type: ignore[misc]
    window_file.encode_frame = encode
