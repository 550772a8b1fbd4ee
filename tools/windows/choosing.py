# SPDX-License-Identifier: Apache-2.0
"""Chooses the newest window that is complete for all ranks of its layout, on any node."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tools.windows.export import ExportError, one_run
from tools.windows.found import Found


class Newest(NamedTuple):
    """The newest window that all ranks of a run have."""

    run: str
    iteration: int
    files: list[Found]
    """Committed files, copies included."""


def newest(found: Sequence[Found], directory: Path) -> Newest:
    """Find the window to export below a directory.

    Only a window of one slot holds one state of everything; a longer one takes a replay, which
    takes the run's own launch.

    Raises:
        ExportError: there are several runs, or no window of all ranks, or it needs a replay.
    """
    run = one_run(found, directory)
    ordered = by_window(found)
    if not ordered:
        raise ExportError(f'{directory}: {_problems(found) or "there is no window"}')
    whole = next((files for files in ordered if not _missing_of(files)), None)
    if whole is None:
        absent = ', '.join(map(str, _missing_of(ordered[0])))
        raise ExportError(
            f'{directory}: of window {ordered[0][0].window} there is none of the ranks {absent}'
            f'{_problems(found, "; ")}. Bring what other nodes hold into this directory.'
        )
    first = whole[0]
    if first.slots != 1:
        raise ExportError(
            f'window {first.window} has {first.slots} slots, which only a replay puts together: '
            'export without --offline, and give after -- the command that launched the run'
        )
    return Newest(run, first.start, whole)


def by_window(found: Sequence[Found]) -> list[list[Found]]:
    """Undamaged files of each window of a run, the newest window first."""
    windows: dict[tuple[object, ...], list[Found]] = defaultdict(list)
    for one in found:
        if one.sound:
            windows[one.start, one.window, one.digests].append(one)
    return [windows[name] for name in sorted(windows, reverse=True)]


def missing(files: Sequence[Found]) -> list[int]:
    """Ranks of the layout without a file here; empty if the window does not state its layout."""
    layout = files[0].layout
    ranks = range(0 if layout is None else layout.ranks)
    return sorted(set(ranks) - {one.rank for one in files})


def _missing_of(files: Sequence[Found]) -> list[int]:
    if files[0].layout is None:
        raise ExportError(
            f'{files[0].path}: it does not say its layout, as it is of an earlier release: export '
            'without --offline, and give after -- the command that launched the run'
        )
    return missing(files)


def _problems(found: Sequence[Found], before: str = '') -> str:
    """Problems of committed files, in one line."""
    problems = [f'{one.path}: {one.problem}' for one in found if one.problem is not None]
    return before + '; '.join(problems) if problems else ''
