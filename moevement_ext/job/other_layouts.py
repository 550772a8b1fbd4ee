# SPDX-License-Identifier: Apache-2.0
"""Finds, assembles and frees windows of other layouts. Training thread."""

import xxhash

from moevement_ext.capture.layout import Operators, SlotLayout
from moevement_ext.config import OFF, is_export
from moevement_ext.errors import HostMemoryError
from moevement_ext.logger import logger_of
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.disk import DiskWindows
from moevement_ext.memory.holder_lock import StoreInUseError
from moevement_ext.memory.shelf import Shelf
from moevement_ext.memory.window.format import window_capacity
from moevement_ext.memory.window.settings import encode
from moevement_ext.memory.window.slot import SlotContext, frame_bytes_bound
from moevement_ext.plan.byte_planner import WindowPlan
from moevement_ext.protect.checkpointer import slot_header
from moevement_ext.protect.protection import Protection
from moevement_ext.recover import whole_job
from moevement_ext.recover.conversion import Conversion
from moevement_ext.recover.reshard import found
from moevement_ext.recover.reshard.assembly import Assembly
from moevement_ext.recover.trainer import Trainer
from moevement_ext.replicate.host_memory import HostMemory
from moevement_ext.replicate.protocol import MIN_BYTES_PER_SECOND

logger = logger_of(__name__)


class OtherLayouts:
    """Windows of the run's other layouts; none without `--sparse-ckpt-elastic`."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        elastic = rank.config.elastic != OFF
        self._shelf = found.shelf_of(rank.config, rank.run_id) if elastic else None
        self._elsewhere = found.NOTHING

    @property
    def candidates(self) -> list[found.Candidate]:
        """Complete windows of all owners, best first."""
        return self._elsewhere.candidates

    def find(self, dense_iteration: int, last_iteration: int | None) -> int:
        """Search as `reshard.found.find`; the newest dense iteration, -1 if none. Collective."""
        if self._shelf is None:
            return -1
        self._elsewhere = found.find(self._rank, self._shelf, dense_iteration, last_iteration)
        return self._elsewhere.dense_at

    def require(self, own: whole_job.Predecessor) -> None:
        """Refuse to continue without newer windows than `own`, those of this layout.

        Deletes nothing. See `found.require_parts`, and with `--sparse-ckpt-elastic-exact`
        `found.require_exact`.
        """
        newest, config = _newest(own), self._rank.config
        if not config.forget:
            found.require_parts(self._elsewhere, newest)
        if config.elastic_exact and self._elsewhere.dense_at > newest:
            found.require_exact(self.candidates[0], self._rank.world_size)

    def keep_until_replaced(self, memory: HostMemory, disk: DiskWindows | None) -> None:
        """Free these windows once all ranks have their own window; on disk, two windows."""
        shelf, runs = self._shelf, self._elsewhere.runs
        if shelf is None or is_export():
            return

        def forget() -> None:
            memory.server.serve_shelf(None)
            shelf.close()
            if memory.first_on_node():
                shelf.remove(self._useless(shelf) if self._elsewhere is found.NOTHING else runs)

        memory.forget_other_layouts = forget
        if disk is not None:
            disk.forget_other_layouts = lambda: shelf.remove_on_disk(runs)

    def _useless(self, shelf: Shelf) -> list[str]:
        """Directories to free; a process that has joined a running job has not searched before."""
        try:
            return found.take_stock(self._rank.identity, self._rank.config, shelf).runs
        except StoreInUseError as error:
            logger.warning('windows of other layouts stay: %s', error)
            return []

    def part(self, protection: Protection, trainer: Trainer, iteration: int) -> None:
        """Before a planned end, keep the state after `iteration` in one slot, for any layout.

        `iteration` is the same on all ranks.
        """
        if self._shelf is None or is_export():
            return
        try:
            state = trainer.begin_iteration(iteration)
            held = part(protection, self._rank, trainer.operators, iteration, state)
        except HostMemoryError as error:
            logger.warning('the final state is not kept, only earlier windows: %s', error)
            return
        if not held:
            logger.warning(
                'not all ranks have reported that they keep the state of iteration %d', iteration
            )

    def obtain(
        self, memory: HostMemory, trainer: Trainer, own: whole_job.Predecessor
    ) -> Conversion | None:
        """Assemble the newest window, if it is newer than those of this layout (`own`). Collective.

        Raises `UserError` if this layout cannot, or must not, continue from these
        windows.
        """
        if self._shelf is None or not self.candidates or trainer.resharding is None:
            return None
        picking = Assembly(
            self._rank,
            self._shelf,
            self._elsewhere,
            memory,
            trainer.operators,
            trainer.resharding,
            own.history,
        )
        conversion = picking.obtain(_newest(own))
        if conversion is None and not own.candidates:
            reason = 'no window of another layout could be put together'
            whole_job.next_tier(reason, self._rank, own.dense_iteration)
        return conversion


def _newest(own: whole_job.Predecessor) -> int:
    """Iteration of the newest dense state in windows of this layout, -1 if there is none."""
    return max((window.dense_at for window in own.candidates), default=-1)


# Wait for the other ranks, in addition to the transfer time of the bytes.
_WAIT_S = 10.0


def part(
    protection: Protection, rank: Rank, operators: Operators, iteration: int, state: bytes
) -> bool:
    """Capture the last window of a job that ends as planned: one slot with the whole state.

    The next start, in any layout, continues from it without replaying iterations or converting
    a window of several slots. All ranks call this at the same iteration.

    `protection` is started, and not in a recovery; `state` is the auxiliary state after
    `iteration`. True if all ranks and their replica holders have the window, and with
    `--sparse-ckpt-disk` all disks, too. Raises `HostMemoryError` without room for the window.
    """
    protection.checkpointer.stop_capturing()
    windows = protection.memory.windows
    plan = xxhash.xxh3_64_hexdigest(f'{rank.identity.topology} parts'.encode())
    name = protection.checkpointer.history.window(iteration, plan)
    layout = SlotLayout(WindowPlan((tuple(operators.slices),)), 0, operators.slices)
    context = SlotContext(list(layout.full), [], state)
    settings = encode(rank.identity.settings)
    header = slot_header(rank.identity, name, 0, layout, context, settings=settings)
    file = windows.begin(name)
    if file is None:  # one more: no window that is still being replicated is overwritten
        needed = window_capacity([(header.payload_bytes, frame_bytes_bound(header))])
        file = windows.begin_larger(name, needed)
    try:
        payload = file.reserve_slot(0, layout.payload_bytes)
        for volatile in (True, False):
            for piece in layout.copies(payload, volatile):
                for target, source in zip(piece.targets, piece.sources, strict=True):
                    target.copy_(source)
    except HostMemoryError:
        windows.abandon(file)
        raise
    protection.windows.sealed(file, header)
    wait_s = _WAIT_S + layout.payload_bytes / MIN_BYTES_PER_SECOND
    persisted = protection.windows.wait_until_persisted(name, wait_s)
    return persisted and protection.keep_last(name, wait_s)
