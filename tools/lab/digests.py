# SPDX-License-Identifier: Apache-2.0
"""Digests of final states, as `--sparse-ckpt-digest` writes them, and their differences."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .programs import LabError
from .tables import table


class StateDigest(msgspec.Struct, frozen=True):
    """The final training state of a job, as `--sparse-ckpt-digest` wrote it."""

    digest: str
    """SHA-256 of all other fields."""
    iteration: int
    ranks: dict[str, dict[str, str]]
    """Per rank, SHA-256 by name; a name begins with its kind: `exp_avg/decoder...`."""


class Difference(NamedTuple):
    """One entry that differs between two files."""

    rank: str
    kind: str
    name: str


def read_digest(path: Path) -> StateDigest:
    """Raises LabError: it is no file of a digest; the message names the file and the problem."""
    try:
        state = msgspec.json.decode(path.read_bytes(), type=StateDigest)
    except OSError as error:
        raise LabError(f'{path}: {error.strerror}') from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LabError(
            f'{path}: not a file of --sparse-ckpt-digest ({error}); give the file that a '
            'completed run wrote'
        ) from error
    if not any(state.ranks.values()):
        raise LabError(f'{path}: holds no digests, so it proves nothing')
    return state


def differences(first: StateDigest, second: StateDigest) -> list[Difference]:
    """All entries that differ; empty if the states are equal, bit for bit."""
    found = list(_entry_differences(first, second))
    if first.iteration != second.iteration:
        found.insert(0, Difference('all', 'iteration', f'{first.iteration}, {second.iteration}'))
    if not found and first.digest != second.digest:
        found.append(Difference('all', 'digest', 'the total contradicts the entries'))
    return found


def compare(console: Console, first: StateDigest, second: StateDigest) -> list[str]:
    """Print a table of the differences of two states, if any; returns their kinds."""
    if found := differences(first, second):
        console.print(_table(found, first, second))
    return sorted({one.kind for one in found})


def kinds_of_difference(first: StateDigest, second: StateDigest) -> list[str]:
    return sorted({difference.kind for difference in differences(first, second)})


def _entry_differences(first: StateDigest, second: StateDigest) -> Iterator[Difference]:
    for rank in sorted(first.ranks.keys() | second.ranks.keys(), key=lambda r: (len(r), r)):
        ours, theirs = first.ranks.get(rank, {}), second.ranks.get(rank, {})
        if not ours or not theirs:
            yield Difference(rank, 'rank', 'has no entries in one file')
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                yield Difference(rank, name.partition('/')[0], name)


def _table(found: Sequence[Difference], first: StateDigest, second: StateDigest) -> Table:
    groups: dict[tuple[str, str], list[str]] = {}
    for rank, kind, name in found:
        groups.setdefault((rank, kind), []).append(name)
    rows = []
    for (rank, kind), names in groups.items():
        every = {*first.ranks.get(rank, {}), *second.ranks.get(rank, {})}
        total = sum(name.partition('/')[0] == kind for name in every) or len(names)
        example = escape(names[0].removeprefix(f'{kind}/'))
        rows.append((rank, kind, str(len(names)), str(total), example))
    columns = ('>rank', 'kind', '>different', '>of', 'for example')
    return table(columns, rows, title='States differ', title_justify='left')
