# SPDX-License-Identifier: Apache-2.0
"""Windows of any run below a directory, in host memory or on disk.

<dir>/<run id>/<node>/<holder>/<owner>/window-<start>-<plan>.window     host memory
<dir>/<run id>/<node>/<holder>/stub-<owner>/window-<start>-<plan>.window  what the holder, which
                                    captures the same, needs of the owner besides its own window
<disk>/<run id>/rank<owner>/window-<start>-<plan>.window                disk
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from moevement_ext.memory.node_store import FORMER, STUB
from moevement_ext.memory.private_file import ForeignFileError
from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.reader import WindowReader
from moevement_ext.memory.window.refusal import RefusedWindow, TruncatedWindow, UnreadableWindow
from moevement_ext.memory.window.settings import Layout

MEMORY = 'memory'
DISK = 'disk'

_STATES = {
    'window': 'committed',
    'writing': 'being written',
    'aside': 'set aside',
    'free': 'free',
}
_FILE = re.compile(rf'({"|".join(_STATES)})-((\d+)(-\w+)?)\.window')
_ON_DISK = re.compile(r'rank(\d+)')


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A file with a window of one rank."""

    run: str
    tier: str
    """`MEMORY` or `DISK`."""
    rank: int
    holder: int | None = None
    """Rank with the file in its memory: the owner, or a peer."""
    node: str | None = None
    """Present or last node of that rank."""
    state: str
    """State of the file; recovery uses only committed files."""
    nbytes: int
    path: Path
    window: str = ''
    """Start and plan, from the file's name; empty if the file is free."""
    start: int = -1
    slots: int | None = None
    """Number of slots; all of them unless there is a problem."""
    layout: Layout | None = None
    """Layout of the job; None in windows that do not record it."""
    digests: tuple[str, str] | None = None
    """Digests of run and layout; equal for windows that belong together."""
    verified: bool = False
    problem: str | None = None
    foreign: bool = False
    """The file has a problem: this user cannot read it now, or other users may write to it."""

    @property
    def sound(self) -> bool:
        """True if the file is complete, committed, and has no problem found so far."""
        return self.state == 'committed' and self.problem is None

    @property
    def root(self) -> Path:
        """Directory of `--sparse-ckpt-dir` or `--sparse-ckpt-disk`."""
        return self.path.parents[2 if self.tier == DISK else 4]

    @property
    def held_by(self) -> str:
        return DISK if self.tier == DISK else f'rank {self.holder} on {self.node}'


def find(directory: Path, verify: bool = False) -> list[Found]:
    """All windows below a directory, by run, rank and age, the newest first.

    Args:
        directory: any level, from `--sparse-ckpt-dir` or `--sparse-ckpt-disk` down.
        verify: read payloads and compare all checksums, not only those of headers.

    Raises `OSError` if a directory cannot be read.
    """
    files = [
        Path(root, name)
        for root, _, names in os.walk(directory.resolve(), onerror=_raise_unless_gone)
        for name in names
        if _FILE.fullmatch(name)
    ]
    found = [one for path in files if (one := _inspect(path, verify)) is not None]
    return sorted(found, key=lambda one: (one.run, one.rank, -one.start, str(one.path)))


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # a running job deletes directories
        raise error


def by_run(found: Iterable[Found]) -> dict[str, list[Found]]:
    runs: dict[str, list[Found]] = defaultdict(list)
    for one in found:
        runs[one.run].append(one)
    return runs


def by_window(found: Iterable[Found]) -> list[list[Found]]:
    """Undamaged files of each window of a run, the newest window first."""
    windows: dict[tuple[object, ...], list[Found]] = defaultdict(list)
    for one in found:
        if one.sound:
            windows[one.start, one.window, one.digests].append(one)
    return [windows[name] for name in sorted(windows, reverse=True)]


def complete(found: Iterable[Found]) -> dict[str, list[str]]:
    """Complete windows of all ranks of a run that are seen here, by run; the newest first.

    Ranks without any file here (on another node) are ignored.
    """
    return {
        run: [files[0].window for files in by_window(own) if _ranks(files) == _ranks(own)]
        for run, own in by_run(found).items()
    }


def missing(files: Sequence[Found]) -> list[int]:
    """Ranks of the layout without a file here; empty if the window does not state its layout."""
    layout = files[0].layout
    return sorted(set(range(0 if layout is None else layout.ranks)) - _ranks(files))


def _ranks(files: Iterable[Found]) -> set[int]:
    return {one.rank for one in files}


def _inspect(path: Path, verify: bool) -> Found | None:
    """Inspect a file; None if a running job has renamed it meanwhile."""
    try:
        one = _placed(path, path.stat().st_size)
    except FileNotFoundError:
        return None
    if one.state == 'free':
        return one
    verified = verify and one.state == 'committed'
    try:
        with WindowReader(path) as reader:
            if str(reader.name) != one.window:
                raise RefusedWindow(f'holds window {reader.name}')
            headers = reader.verify_identity(Expected(owner=one.rank))
            if verified:
                reader.verify_payloads(headers)
    except RefusedWindow as refusal:
        if not path.exists():
            return None
        if one.state == 'being written' and isinstance(refusal, TruncatedWindow):
            return one  # no problem
        return _refused(one, refusal)
    first = headers[0]
    return msgspec.structs.replace(
        one,
        slots=len(headers),
        layout=first.placed and first.placed.layout,
        digests=(first.run, first.topology),
        verified=verified,
    )


def _refused(one: Found, refusal: RefusedWindow) -> Found:
    cause = refusal.__cause__
    problem = cause.fault if isinstance(cause, ForeignFileError) else refusal.reason
    if isinstance(cause, ForeignFileError | PermissionError):
        problem = f'{problem}: run as its owner, after chmod 600'
    foreign = isinstance(refusal, UnreadableWindow)
    return msgspec.structs.replace(one, problem=problem, foreign=foreign)


def _placed(path: Path, nbytes: int) -> Found:
    """Fields from the path and the name of a file."""
    match, parents = _FILE.fullmatch(path.name), [parent.name for parent in path.parents]
    assert match is not None
    found: dict[str, Any] = {'state': _STATES[match[1]], 'nbytes': nbytes, 'path': path}
    if on_disk := _ON_DISK.fullmatch(parents[0]):
        found |= {'run': parents[1], 'tier': DISK, 'rank': int(on_disk[1])}
    else:
        numbers = [name.removeprefix(STUB) for name in parents[:2]]
        rank, holder = (int(name) if name.isdecimal() else -1 for name in numbers)
        found |= {'run': parents[3], 'tier': MEMORY, 'rank': rank}
        found |= {'holder': holder, 'node': parents[2]}
        if parents[1].startswith(FORMER):  # its deletion was cut off
            found['state'] = _STATES['free']
    if found['state'] != 'free':
        found |= {'window': match[2], 'start': int(match[3])}
    return Found(**found)
