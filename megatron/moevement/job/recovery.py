# SPDX-License-Identifier: Apache-2.0
"""Whole-job recovery: find a window that all ranks can get, verify it, hand it to conversion.

Every step is collective, so that all ranks take the same window or the same next tier: own memory,
a replica, the dense checkpoint on disk, the start.
"""

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from megatron.moevement.job.conversion import Conversion
from megatron.moevement.seams import upstream
from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.events import EventLog
from moevement_ext.membership.exchange import Exchange
from moevement_ext.memory.ledger import Ledger
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.name import HeldWindow, RankIdentity, Window
from moevement_ext.memory.window.refused import RefusedWindow
from moevement_ext.memory.window.slot import SlotHeader
from moevement_ext.recover.inventory import candidates, held_windows
from moevement_ext.recover.sources import VerifiedWindow, verified_window
from moevement_ext.recover.verification import Verified
from moevement_ext.replicate.host_memory import HostMemory

logger = logging.getLogger(__name__)


@dataclass
class Predecessor:
    """What an earlier life of the job left in host memory, over all nodes."""

    inventories: list[list[HeldWindow]]
    candidates: list[Window]
    """Windows to try, best first; empty if the dense checkpoint or the start is better."""
    committed: int
    """Newest iteration that any rank committed, -1 if nothing is known."""


@dataclass
class Phases:
    """Seconds of each phase of a recovery on this rank, for the event and the log."""

    find: float = 0.0
    obtain: float = 0.0
    load: float = 0.0
    convert: float = 0.0
    catch_up: float = 0.0


def find(
    store: NodeStore, identity: RankIdentity, args: Any, events: EventLog, exchange: Exchange
) -> Predecessor:
    """Look for windows of a predecessor on all nodes. Collective."""
    held = held_windows(store, identity.run, identity.topology)
    inventories = [
        msgspec.msgpack.decode(item, type=list[HeldWindow])
        for item in exchange('windows', msgspec.msgpack.encode(held))
    ]
    own = str(newest_committed(store, identity)).encode()
    committed = max(int(item) for item in exchange('committed', own))
    everything = {part for inventory in inventories for part in inventory}
    complete = candidates(everything, args.world_size)
    dense = upstream.dense_checkpoint_iteration(args)
    usable = [c for c in complete if dense <= c.dense_at < (args.train_iters or c.dense_at + 1)]
    if everything or committed >= 0:
        events.emit('failure_detected', committed=committed, windows=len(complete))
    if everything and not usable:
        reason = (
            f'the dense checkpoint of iteration {dense} is newer than every window'
            if complete
            else 'no window is complete on all ranks'
        )
        next_tier(reason, args, events)
    return Predecessor(inventories, usable, committed)


def obtain(
    memory: HostMemory,
    predecessor: Predecessor,
    identity: RankIdentity,
    args: Any,
    events: EventLog,
    exchange: Exchange,
    check: Callable[[SlotHeader], None],
) -> Conversion | None:
    """The newest window that every rank holds, or fetched, whole and undamaged. Collective.

    Args:
        check: raises RefusedWindow of a slot that is not of the model at hand.

    Returns:
        Its conversion, or None: go on with the next tier.
    """
    for candidate in predecessor.candidates:
        file = _verified(memory, candidate, predecessor, identity, check)
        if exchange.all_agree(f'verified/{candidate.start}', file is not None):
            assert file is not None
            memory.windows.persisted(candidate.name)
            memory.windows.discard_after(candidate.start)
            return Conversion(VerifiedWindow(file))
        logger.warning('window %d is not whole on every rank', candidate.start)
    next_tier('no window could be verified on all ranks', args, events)
    return None


def next_tier(reason: str, args: Any, events: EventLog) -> None:
    """Say why host memory is not used and what is used instead."""
    dense = upstream.dense_checkpoint_iteration(args)
    tier = f'the dense checkpoint of iteration {dense}' if dense >= 0 else 'the start'
    events.emit('next_tier', reason=reason, tier=tier)
    if args.rank == 0:
        logger.warning('sparse checkpointing: recovering from %s: %s', tier, reason)


def refuse(memory: HostMemory, verified: Verified, args: Any, events: EventLog) -> NoReturn:
    """The state that all stages came to differs, and `--sparse-ckpt-verify stop` forbids to use it.

    Without the windows of this rank the next start takes the next tier.
    """
    memory.forget_windows()
    next_tier(f'the recovered state is not what it had been: {verified}', args, events)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_WHOLE_JOB)


def newest_committed(store: NodeStore, identity: RankIdentity) -> int:
    """Newest iteration in the ledger of this rank's predecessor, -1 if there is none."""
    entry = Ledger.read_newest(store.ledger_path(identity.rank))
    return entry.iteration if entry is not None else -1


def _verified(
    memory: HostMemory,
    candidate: Window,
    predecessor: Predecessor,
    identity: RankIdentity,
    check: Callable[[SlotHeader], None],
) -> WindowFile | None:
    try:
        file = verified_window(memory, candidate, predecessor.inventories, identity)
        for slot in file.slots():
            check(file.header(slot))
        return file
    except RefusedWindow as refusal:
        logger.warning('refused: %s', refusal)
        return None
