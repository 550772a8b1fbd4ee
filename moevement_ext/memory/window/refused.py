# SPDX-License-Identifier: Apache-2.0
"""Reasons to refuse a window (invariant I7): one type per reason, one line per message."""

from pathlib import Path

from moevement_ext.errors import SparseCheckpointError


class RefusedWindow(SparseCheckpointError):
    """A window must not be loaded; recovery continues with the next tier."""


class UnreadableWindow(RefusedWindow):
    """A file that cannot be opened or read now; its window may be whole."""


class TruncatedWindow(RefusedWindow):
    """The file of a window is truncated, or slots are missing."""


class CorruptWindow(RefusedWindow):
    """A window differs from the written bytes; the message names file, slot, operator, tensor."""


class OtherSettings(RefusedWindow):
    """A window of another run, layout or program version than this job's."""


class WrongWindow(RefusedWindow):
    """A window other than the requested one (owner, start or plan)."""


class UnknownVersion(OtherSettings):
    """A window in a format version that this program does not read."""


class OtherBytes(RefusedWindow):
    """Two ranks that should hold the same bytes differ; the message names a tensor."""


def unopened(path: Path, error: OSError | SparseCheckpointError) -> RefusedWindow:
    """The error for a file that cannot be opened or mapped; unreadable, unless it is missing."""
    if isinstance(error, SparseCheckpointError):
        return UnreadableWindow(str(error))
    kind = RefusedWindow if isinstance(error, FileNotFoundError) else UnreadableWindow
    return kind(f'{path}: cannot be opened: {error.strerror}')
