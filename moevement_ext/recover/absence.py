# SPDX-License-Identifier: Apache-2.0
"""Windows that all ranks had, and of which parts are not there at a start.

A disk that is not mounted yet, or a directory that differs on one node, looks like an empty past.
To start over then would have the others delete what they have, for good. So a job whose past was
complete once, and cannot be put together, does not start before it is told to forget it.
"""

from collections.abc import Collection, Sequence

import msgspec

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.errors import UserError
from moevement_ext.memory.window.name import HeldWindow, Window

FLAG = '--sparse-ckpt-forget'
_NAMED = 8


class AbsentWindows(UserError):
    """Some ranks have windows, others nothing, and no window is complete."""


class Traces(msgspec.Struct, frozen=True):
    """What tells that a rank has a past."""

    node: str
    newest_complete: int
    """Start of the newest window that all ranks had, as far as this one was told; -1 if none."""
    past: bool
    """It has window files, also refused ones, or a ledger: its windows are gone on purpose."""


def refuse_to_forget(
    held: Collection[HeldWindow],
    traces: Sequence[Traces],
    dense_iteration: int,
    config: SparseCheckpointConfig,
) -> None:
    """Called by all ranks alike, when no window can be put together.

    A window that is there and refused (damaged, of another run) will not become right by waiting.

    Args:
        held: parts of windows, over all ranks.
        traces: of every rank.
        dense_iteration: of what the job would go on from, -1 for the start.
        config: settings.

    Raises:
        AbsentWindows: what all ranks had is newer than that, and ranks are without any.
    """
    known = max(trace.newest_complete for trace in traces)
    if config.forget or not held or known < max(dense_iteration, 0):
        return
    owners: dict[Window, set[int]] = {}
    for part in held:
        owners.setdefault(part.window, set()).add(part.owner)
    nearest = max(owners, key=lambda window: (len(owners[window]), window))
    without = [rank for rank in range(len(traces)) if rank not in owners[nearest]]
    absent = [rank for rank in without if not traces[rank].past]
    if not absent:
        return
    places = f'--sparse-ckpt-dir {config.dir}'
    if config.disk is not None:
        places += f' or --sparse-ckpt-disk {config.disk}'
    most = len(owners[nearest])
    starts = sorted({window.start for window in owners if len(owners[window]) == most})
    tier = f'the dense checkpoint of iteration {dense_iteration}' if dense_iteration >= 0 else ''
    raise AbsentWindows(
        f'all ranks had window {known}, and none is complete now: nothing is in {places} of '
        f'{_named(absent, traces)}; {_named(sorted(owners[nearest]), traces)} have '
        f'windows {", ".join(map(str, starts))}. Mount what is not mounted there, or give all '
        f'nodes the same directories, and start again; {FLAG} goes on from '
        f'{tier or "the start"} without them.'
    )


def _named(ranks: Sequence[int], traces: Sequence[Traces]) -> str:
    nodes = list(dict.fromkeys(traces[rank].node for rank in ranks))
    return (
        f'{"ranks" if len(ranks) > 1 else "rank"} {_some(ranks)} '
        f'(node{"s" if len(nodes) > 1 else ""} {_some(nodes)})'
    )


def _some(names: Sequence[object]) -> str:
    rest = len(names) - _NAMED
    shown = ', '.join(map(str, names[:_NAMED]))
    return f'{shown} and {rest} more' if rest > 0 else shown
