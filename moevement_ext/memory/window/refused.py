# SPDX-License-Identifier: Apache-2.0
"""Why a window must not be loaded (invariant I7): one type per reason, one line per message."""

from moevement_ext.errors import SparseCheckpointError


class RefusedWindow(SparseCheckpointError):
    """A window that must not be loaded; recovery goes on with the next tier."""


class TruncatedWindow(RefusedWindow):
    """The file is cut off or slots are missing."""


class CorruptWindow(RefusedWindow):
    """Bytes are not what was written; the message names file, slot, operator and tensor."""


class ForeignRun(RefusedWindow):
    """The window belongs to another run."""


class WrongTopology(RefusedWindow):
    """The window was written under another parallel layout."""


class WrongWindow(RefusedWindow):
    """The file holds another window (owner, start or plan) than the one asked for."""


class UnknownVersion(RefusedWindow):
    """The file was written in a format this program does not read."""
