# SPDX-License-Identifier: Apache-2.0
"""Whole-job recovery: find a window that all ranks can get, verify it, hand it to conversion.

Every step is collective, so that all ranks take the same window or the same next tier: own memory,
a replica, the windows on disk, the dense checkpoint, the start.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from moevement_ext.config import OFF
from moevement_ext.errors import EXIT_OTHER_BITS, EXIT_WHOLE_JOB, UserError
from moevement_ext.events import FailureDetected, NextTier
from moevement_ext.logger import logger_of
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.disk import DiskWindows
from moevement_ext.memory.ledger import Ledger
from moevement_ext.memory.node_store import Death, NodeStore, forget_deaths, noted_deaths
from moevement_ext.memory.shelf import base_of, directories_of, left_by_elastic
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.name import HeldWindow, Window, drawn_history, patiently
from moevement_ext.memory.window.refusal import RefusedWindow, UnreadableWindow
from moevement_ext.memory.window.settings import first_lines
from moevement_ext.memory.window.slot import SlotHeader
from moevement_ext.plan.strategy.choice import disk_only
from moevement_ext.recover import launched_alike
from moevement_ext.recover.absence import FLAG, name_other_runs, refuse_to_forget, tier_of
from moevement_ext.recover.conversion import Conversion
from moevement_ext.recover.inventory import Inventory, candidates, take_stock
from moevement_ext.recover.sources import VerifiedWindow, make_room, verified_window
from moevement_ext.replicate.host_memory import HostMemory
from moevement_ext.system.leaving import end_at_once

logger = logger_of(__name__)


_INVENTORY = msgspec.msgpack.Decoder(Inventory)


@dataclass(kw_only=True)
class Predecessor:
    """Windows of an earlier start of the job, in host memory and on disk of all nodes."""

    inventories: list[list[HeldWindow]]
    """Windows in memory on each rank's node, by rank."""
    on_disk: list[Window]
    """Windows that all ranks have on disk, the newest first."""
    candidates: list[Window]
    """Windows to try, best first; empty if the dense checkpoint or the start is better."""
    committed: int
    """Newest iteration that any rank committed, -1 if nothing is known."""
    dense_iteration: int
    first_death: Death | None = None
    history: str = ''
    """History that this start begins."""


def find(
    store: NodeStore,
    disk: DiskWindows | None,
    rank: Rank,
    dense_iteration: int,
    last_iteration: int | None,
    elsewhere: int = -1,
) -> Predecessor:
    """Find windows of a predecessor on all nodes. Collective.

    `dense_iteration` is that of the newest dense checkpoint that would be loaded, `elsewhere` that
    of a dense state in windows of another layout; -1: there is none. `last_iteration`, at which
    training ends, is None if not yet known. Raises `UserError` if ranks were launched differently
    (see `launched_alike.check`), or no window is complete any more, and some ranks have none.
    """
    searches = rank.config.elastic != OFF and elsewhere < 0
    layouts, left = [], []
    with suppress(UnreadableWindow):  # `reshard.found.find` refuses that, or nothing there changes
        layouts = directories_of(store.root, base_of(store.run_id)) if searches else []
        left = left_by_elastic(store) if rank.config.elastic == OFF else []
    stock = take_stock(store, disk, rank.identity, disk_only(rank.config), layouts)
    found_here = msgspec.structs.replace(
        stock,
        deaths=noted_deaths(store.shared),
        refused=[*stock.refused, *left],
        history=drawn_history(),
    )
    inventories = [
        _INVENTORY.decode(item)
        for item in rank.exchange('windows', msgspec.msgpack.encode(found_here))
    ]
    refused = launched_alike.check(rank, inventories)
    newest = Ledger.read_newest(store.ledger_path(rank.number), rank.identity)
    own = str(-1 if newest is None else newest.iteration).encode()
    committed = max(int(item) for item in rank.exchange('committed', own))
    on_disk = {part for inventory in inventories for part in inventory.disk}
    everything = on_disk.union(*(inventory.memory for inventory in inventories))
    complete = candidates(everything, rank.world_size)
    usable = [
        found
        for found in complete
        if dense_iteration <= found.dense_at < (last_iteration or found.dense_at + 1)
    ]
    if everything or committed >= 0:
        rank.events.emit(FailureDetected(committed=committed, windows=len(complete)))
    predecessor = Predecessor(
        inventories=[inventory.memory for inventory in inventories],
        on_disk=candidates(on_disk, rank.world_size),
        candidates=usable,
        committed=committed,
        dense_iteration=dense_iteration,
        first_death=min((death for one in inventories for death in one.deaths), default=None),
        history=inventories[0].history,
    )
    forget_deaths(store.shared)  # all ranks have read them: `rank.exchange` is collective
    if not (everything or refused):
        name_other_runs(store, rank)
    if not complete:
        traces = [inventory.traces for inventory in inventories]
        refuse_to_forget(everything, traces, max(dense_iteration, elsewhere), rank.config)
    if (everything or refused) and not usable and elsewhere < 0:
        reason = _why_none(complete, refused, dense_iteration, last_iteration)
        next_tier(reason, rank, dense_iteration)
    return predecessor


def _why_none(
    complete: Sequence[Window],
    refused: Sequence[str],
    dense_iteration: int,
    last_iteration: int | None,
) -> str:
    newer = [found.dense_at for found in complete if found.dense_at >= dense_iteration]
    if newer:
        return (
            f'training ends at iteration {last_iteration}, and every newer window is of iteration '
            f'{min(newer)} or later'
        )
    if complete:
        return f'the dense checkpoint of iteration {dense_iteration} is newer than every window'
    if refused:
        return f'windows are of another launch: {first_lines(refused)}'
    return 'no window is complete on all ranks'


def obtain(
    memory: HostMemory, predecessor: Predecessor, rank: Rank, check: Callable[[SlotHeader], None]
) -> Conversion | None:
    """Obtain the newest window that is whole and undamaged on all ranks. Collective.

    `check` raises RefusedWindow for a slot of another model. None: continue with the next tier.
    Raises `UserError` on all ranks if no window is left, since a source could not be read.
    """
    unread: list[str] = []
    for candidate in predecessor.candidates:
        make_room(memory.windows, candidate, predecessor.candidates)
        obtained = _verified(memory, candidate, predecessor, rank, check, unread)
        if rank.exchange.all_agree(f'verified/{candidate.start}', obtained is not None):
            assert obtained is not None
            file, source = obtained
            memory.windows.persisted(candidate.name)
            return Conversion(VerifiedWindow(file), source)
        logger.warning('window %d is not whole on every rank', candidate.start)
    _stop_if_unread(unread, rank)
    next_tier('no window could be verified on all ranks', rank, predecessor.dense_iteration)
    return None


def _stop_if_unread(unread: Sequence[str], rank: Rank) -> None:
    answers = rank.exchange('unread', '; '.join(unread[:1]).encode())
    reasons = [f'rank {number}: {item.decode()}' for number, item in enumerate(answers) if item]
    if reasons and not rank.config.forget:
        raise UserError(
            f'no window could be read on all ranks: {reasons[0]}. Mend that and start again; '
            f'{FLAG} goes on without the windows.'
        )


def next_tier(reason: str, rank: Rank, dense_iteration: int) -> None:
    """Log why the windows are not used, and the replacement."""
    tier = tier_of(dense_iteration)
    rank.events.emit(NextTier(reason=reason, tier=tier))
    if rank.number == 0:
        logger.warning('recovering from %s: %s', tier, reason)


def _verified(
    memory: HostMemory,
    candidate: Window,
    predecessor: Predecessor,
    rank: Rank,
    check: Callable[[SlotHeader], None],
    unread: list[str],
) -> tuple[WindowFile, str] | None:
    """The window and its source, or None; adds an error that may be transient to `unread`."""

    def read() -> tuple[WindowFile, str]:
        file, source = verified_window(memory, candidate, predecessor.inventories, rank.identity)
        for slot in file.slots():
            check(file.header(slot))
        return file, source

    try:
        return patiently(read)  # holders live, as all ranks are new
    except RefusedWindow as refusal:
        logger.warning('refused: %s', refusal)
        unread += [str(refusal)] * isinstance(refusal, UnreadableWindow)
        return None


def restart_whole_job(rank: Rank, reason: str) -> NoReturn:
    """Take the next tier: all workers end, and the launcher restarts the whole job."""
    rank.events.emit(NextTier(reason=reason, tier='the whole job'))
    logger.warning('the whole job starts again: %s', reason)
    end_at_once(EXIT_WHOLE_JOB)


def end_with_other_bits(rank: Rank, found: str) -> NoReturn:
    """End the job, as `--sparse-ckpt-verify stop` demands; `found` names ranks and operators."""
    rank.events.emit(NextTier(reason=found, tier='none: the job ends'))
    logger.warning(
        'the job ends with exit status %d, as a recovery computed other bits than before. %s. All '
        'windows stay: replace the node of a failing chip and start again; --sparse-ckpt-verify '
        'report goes on from such a state.',
        EXIT_OTHER_BITS,
        found,
    )
    end_at_once(EXIT_OTHER_BITS)
