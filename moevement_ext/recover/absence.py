# SPDX-License-Identifier: Apache-2.0
"""Detects windows that a start should have found, so that it does not train over them.

An unmounted disk, or a different directory on one node, looks like a job without windows. Starting
over would then make the other ranks delete their windows. So a job whose windows were complete
once, and are not complete now, starts over only with an explicit flag. The same applies to a job
that finds no complete window while a machine has windows under another name (of a container that is
gone), in a format that only another release reads, or in files that cannot be read now.

Without `--sparse-ckpt-run-id` a mistyped flag makes another run: the start names runs of which that
is likely.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.errors import SparseCheckpointError, UserError, some
from moevement_ext.logger import logger_of
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.holder_lock import is_held
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.name import HeldWindow, RankIdentity, Window, names_in, patiently
from moevement_ext.memory.window.refusal import UnreadableWindow
from moevement_ext.memory.window.settings import first_lines, of_same_training

logger = logger_of(__name__)

FLAG = '--sparse-ckpt-forget'
MEMORY, DISK = '--sparse-ckpt-dir', '--sparse-ckpt-disk'
_RUN_ID = '--sparse-ckpt-run-id'
# Maximum number of differences: a run with more is another job, not a mistake.
_MOST = 4


class Traces(msgspec.Struct, frozen=True):
    """Traces of earlier windows on a rank."""

    node: str
    newest_complete: int
    """Start of the newest window known to this rank as complete on all ranks; -1 if none."""
    past: list[str]
    """Where this rank had windows, of `MEMORY` and `DISK`: files (even refused), or a record. What
    is missing beside these was deleted on purpose. One place does not tell of the other."""
    renamed: dict[str, int] = {}
    """If nothing is found: newest start of a window of this run on the machine, by the name that
    the machine had (see `of_other_names`)."""
    unread: dict[str, int] = {}
    """Starts of windows that are not read, but may be whole, by reason (see `refusal.not_read`)."""


def refuse_to_forget(
    held: Collection[HeldWindow],
    traces: Sequence[Traces],
    dense_iteration: int,
    config: SparseCheckpointConfig,
) -> None:
    """Refuse to start over without a flag. All ranks call this when no window is complete.

    An existing but refused window (damaged, of another run) is no reason to wait. `held` and
    `traces` are of all ranks; the job would go on from `dense_iteration`, -1 for the start. Raises
    `UserError` if all ranks had a newer window, and some ranks have none now; or if a newer window
    is under another name of its node, is of another release, or cannot be read now.
    """
    if config.forget:
        return
    _refuse_unread(traces, dense_iteration)
    _refuse_other_names(traces, dense_iteration, config)
    known = max(trace.newest_complete for trace in traces)
    if not held or known < max(dense_iteration, 0):
        return
    owners: dict[Window, set[int]] = {}
    for part in held:
        owners.setdefault(part.window, set()).add(part.owner)
    nearest = max(owners, key=lambda window: (len(owners[window]), window))
    without = [rank for rank in range(len(traces)) if rank not in owners[nearest]]
    places = {place for trace in traces for place in trace.past} or {MEMORY}
    lacking = {rank: places.difference(traces[rank].past) for rank in without}
    absent = [rank for rank in without if lacking[rank]]
    if not absent:
        return
    given = {MEMORY: config.dir, DISK: config.disk}
    empty = {f'{place} {given[place]}' for rank in absent for place in lacking[rank]}
    where = ' or '.join(sorted(empty))
    most = len(owners[nearest])
    starts = sorted({window.start for window in owners if len(owners[window]) == most})
    raise UserError(
        f'all ranks had window {known}, and none is complete now: nothing is in {where} of '
        f'{_named(absent, traces)}; {_named(sorted(owners[nearest]), traces)} have '
        f'windows {", ".join(map(str, starts))}. Mount what is not mounted there, or give all '
        f'nodes the same directories, and start again; {FLAG} goes on from '
        f'{tier_of(dense_iteration)} without them.'
    )


def _refuse_unread(traces: Sequence[Traces], dense_iteration: int) -> None:
    for trace in traces:
        for reason, start in trace.unread.items():
            if start >= max(dense_iteration, 0):
                raise UserError(
                    f'the node {trace.node} {reason}; {FLAG} goes on from '
                    f'{tier_of(dense_iteration)}, and deletes such windows.'
                )


def _refuse_other_names(
    traces: Sequence[Traces], dense_iteration: int, config: SparseCheckpointConfig
) -> None:
    present = {trace.node for trace in traces}
    for trace in traces:
        for name, start in sorted(trace.renamed.items()):
            if name not in present and start >= max(dense_iteration, 0):
                raise UserError(
                    f'no window is complete, but on the node {trace.node} {config.dir} has window '
                    f'{start} of this run, from when the node was named {name}: launch with '
                    f'MOEVEMENT_NODE={name} there, and so on each node whose name has changed; '
                    f'{FLAG} goes on from {tier_of(dense_iteration)} without them.'
                )


def tier_of(dense_iteration: int) -> str:
    """The tier after the windows, in words; -1: without a dense checkpoint."""
    if dense_iteration < 0:
        return 'the start'
    return f'the dense checkpoint of iteration {dense_iteration}'


def _named(ranks: Sequence[int], traces: Sequence[Traces]) -> str:
    nodes = list(dict.fromkeys(traces[rank].node for rank in ranks))
    return (
        f'{"ranks" if len(ranks) > 1 else "rank"} {some(ranks)} '
        f'(node{"s" if len(nodes) > 1 else ""} {some(nodes)})'
    )


def name_other_runs(store: NodeStore, rank: Rank) -> None:
    """Name other runs with windows on rank 0's node that differ in few settings, by these.

    Collective, when the run has no windows. `UserError` with `--sparse-ckpt-strict` if one differs
    in its id alone, as jobs of a chain with Slurm's ids do; it may live on other nodes.
    """
    alone = ''
    searches = rank.number == 0 and rank.config.run_id is None
    with suppress(OSError):
        for run_id in sorted(path.name for path in store.root.iterdir()) if searches else ():
            with suppress(SparseCheckpointError, OSError):  # no run, or nothing of ours
                if run_id != store.run_id:
                    alone = _hint(NodeStore(store.root, run_id, store.path.name), rank) or alone
    hint = rank.exchange('other-runs', alone.encode())[0].decode()
    if hint and rank.config.strict:
        raise UserError(f'--sparse-ckpt-strict: {hint} To start over give it its own {_RUN_ID}.')


def of_other_names(
    store: NodeStore, identity: RankIdentity, layouts: Collection[str] = ()
) -> dict[str, int]:
    """Newest start of a window of this run here, by an earlier name of this machine.

    Excludes emulated nodes with live processes. `layouts` are directories of other layouts, of
    which windows of the same training count. Raises `UnreadableWindow` if that is unknown now.
    """
    found = dict[str, int]()
    for run in {store.run_id, *layouts}:
        for name in names_in(store.root / run):
            if name != store.path.name:
                try:
                    other = NodeStore(store.root, run, name)
                    newest = patiently(partial(_newest, other, store, identity))
                except UnreadableWindow:
                    raise
                except SparseCheckpointError:
                    continue
                found[name] = max(newest, found.get(name, newest))
    return {name: start for name, start in found.items() if start >= 0}


def _newest(other: NodeStore, store: NodeStore, identity: RankIdentity) -> int:
    windows = other.scan()
    if not windows or any(is_held(other.holder_path(found.holder) / 'lock') for found in windows):
        return -1
    newest = windows[0]
    file = WindowFile.open(newest.path)
    if other.run_id == store.run_id:
        file.verify_identity(Expected.of(identity, newest.name)._replace(owner=newest.owner))
    elif not of_same_training(file.header(0).placed, identity.placed):
        return -1
    return newest.name.start


def _hint(other: NodeStore, rank: Rank) -> str:
    """Name `other` in the log if it may be meant; returns the text if its id alone differs."""
    windows = other.scan()
    if not windows or is_held(other.holder_path(windows[0].holder) / 'lock'):
        return ''
    header = WindowFile.open(windows[0].path).header(0)
    lines = Expected.of(rank.identity).differs(header).decisive
    differing = [line for line in lines if not line.startswith(f'{_RUN_ID}:')]
    if not header.settings or len(differing) > _MOST:
        return ''
    hint = (
        f'nothing is found of the run {rank.run_id}; windows of {other.run_id}, from iteration '
        f'{header.start} on, are not used, as it differs in '
        f'{first_lines(differing) or "its id alone"}. '
        'To go on from them launch as that was'
        f'{"" if differing else f", with {_RUN_ID} {other.run_id}"}.'
    )
    logger.warning('%s', hint)
    return '' if differing else hint
