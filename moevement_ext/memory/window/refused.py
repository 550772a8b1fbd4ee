# SPDX-License-Identifier: Apache-2.0
"""Why a window must not be loaded (invariant I7): one type per reason, one line per message."""

from moevement_ext.errors import SparseCheckpointError


class RefusedWindow(SparseCheckpointError):
    """A window that must not be loaded; recovery goes on with the next tier."""


class TruncatedWindow(RefusedWindow):
    """A window whose file is cut off, or that lacks slots."""


class CorruptWindow(RefusedWindow):
    """A window that is not what was written; the message names file, slot, operator, tensor."""


class OtherSettings(RefusedWindow):
    """A window of a job that was launched in another way than this one."""


class ForeignRun(OtherSettings):
    """A window of another run."""


class WrongTopology(OtherSettings):
    """A window that was written under another parallel layout."""


class WrongWindow(RefusedWindow):
    """A window other than the one asked for (owner, start or plan)."""


class UnknownVersion(OtherSettings):
    """A window in a format this program does not read."""


class OtherBytes(RefusedWindow):
    """A rank that should hold the same as another does not; the message names a tensor."""
