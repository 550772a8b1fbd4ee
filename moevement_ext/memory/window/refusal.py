# SPDX-License-Identifier: Apache-2.0
"""Reasons to refuse a window (invariant I7): one type per reason, one line per message."""

from collections.abc import Sequence
from pathlib import Path

from moevement_ext.errors import SparseCheckpointError
from moevement_ext.memory.private_file import ForeignFileError

UNKNOWN = 2**62
"""Start of windows in a directory that cannot be listed: they may be newer than all others."""


class RefusedWindow(SparseCheckpointError):
    """A window must not be loaded; recovery continues with the next tier.

    `reason` is the message without the path of its file, if it is about one.
    """

    def __init__(self, reason: str, path: Path | str | None = None) -> None:
        super().__init__(reason if path is None else f'{path}: {reason}')
        self.reason = reason


class UnreadableWindow(RefusedWindow):
    """A file, directory or holder that cannot be read now; its window may be whole."""


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
    return kind(f'cannot be opened: {error.strerror}', path)


def joined(refusals: Sequence[RefusedWindow], nothing: str = '') -> RefusedWindow:
    """One error about all copies of a window; `nothing` is its message without any copy."""
    unread = any(isinstance(refusal, UnreadableWindow) for refusal in refusals)
    kind = UnreadableWindow if unread else RefusedWindow
    return kind('; '.join(map(str, refusals)) or nothing)


def not_read(refusal: RefusedWindow, start: int = UNKNOWN) -> dict[str, int]:
    """The start of a window that may be whole, by the reason and remedy; else empty."""
    if isinstance(refusal, UnknownVersion):
        why = f'in another format ({refusal}): start the job with that release'
    elif isinstance(refusal, UnreadableWindow):
        cause = refusal.__cause__
        reason = cause.problem if isinstance(cause, ForeignFileError) else str(refusal)
        why = f'and {reason}: mend that (chmod 600, one name), and start again'
    else:
        return {}
    window = 'may have newer windows' if start == UNKNOWN else f'has window {start}'
    return {f'{window} of this run, {why}': start}
