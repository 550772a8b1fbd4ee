# SPDX-License-Identifier: Apache-2.0
"""Finds, assembles and frees windows of other layouts. Training thread.

If the job cannot continue with its nodes, it waits for more, or requests another start.
`torchrun --nnodes MIN:MAX` restarts all workers when a node joins, so the workers only have to
wait. The launchers of this package, and Slurm, start a job with a fixed number of nodes: the job
reports to them how many ranks it needs. Under a `torchrun` that can get no more nodes, the job ends
with the error.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import psutil
import xxhash
from torch.distributed import DistError

from moevement_ext.capture.layout import Operators, SlotLayout
from moevement_ext.config import OFF, is_export
from moevement_ext.errors import EXIT_WHOLE_JOB, HostMemoryError
from moevement_ext.job.ending import announce
from moevement_ext.logger import logger_of
from moevement_ext.membership.mailbox import write_needed_ranks
from moevement_ext.membership.rank import Rank
from moevement_ext.membership.rendezvous import launcher_store
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
from moevement_ext.recover.reshard import found, surplus
from moevement_ext.recover.reshard.assembly import Assembly
from moevement_ext.recover.reshard.found import NodesMissing
from moevement_ext.recover.reshard.stock import shelf_of, take_stock
from moevement_ext.recover.trainer import Trainer
from moevement_ext.replicate.host_memory import HostMemory
from moevement_ext.replicate.protocol import MIN_BYTES_PER_SECOND
from moevement_ext.system.leaving import ASKING, end_at_once
from moevement_ext.system.watchdog import under_torchrun

logger = logger_of(__name__)

_NODES = '--nnodes'
_NODES_VARIABLE = 'PET_NNODES'
_STORE_TIMEOUT = timedelta(seconds=10)
_LOOKS_FOR_ITS_LAUNCHER_S = 2.0


def without_nodes(rank: Rank, missing: NodesMissing) -> None:
    """Wait for more nodes if some may join; returns if the job must end with the error.

    Collective. The limit of the wait is that of a rendezvous. If a larger number of ranks would
    suffice, the job ends with `EXIT_WHOLE_JOB`: after the wait, or at once under a launcher with a
    fixed number of nodes.
    """
    may_come = nodes_may_come() if rank.number == 0 else False
    may_come = rank.exchange('more-nodes', b'1' if may_come else b'0')[0] == b'1'
    if may_come:
        _wait(rank, missing)
    elif under_torchrun():
        return
    if missing.ranks:
        _end(rank, missing)


def nodes_may_come() -> bool:
    """True if this launch may get more nodes."""
    if not under_torchrun():
        return False
    nodes = os.environ.get('GROUP_WORLD_SIZE', '0')
    return int(nodes) < _most_nodes(_command_lines(), os.environ.get(_NODES_VARIABLE))


def _most_nodes(command_lines: Sequence[Sequence[str]], variable: str | None) -> int:
    """Maximum number of nodes of torchrun; 0 if it is not given.

    `command_lines` are those of this process's parents, the nearest first; `variable` is the value
    of torchrun's environment variable for `--nnodes`.
    """
    for command in command_lines:
        for flag, value in zip(command, [*command[1:], ''], strict=True):
            if flag.startswith(f'{_NODES}='):
                value = flag.partition('=')[2]
            elif flag != _NODES:
                continue
            return _most(value)
    return _most(variable or '')


def _most(nodes: str) -> int:
    found = re.fullmatch(r'(?:\d+:)?(\d+)', nodes)
    return int(found[1]) if found else 0


def _command_lines() -> list[list[str]]:
    found = []
    with suppress(psutil.Error):
        found = [parent.cmdline() for parent in psutil.Process().parents()]
    return found


def _wait(rank: Rank, missing: NodesMissing) -> None:
    """Wait until torchrun ends this process because of a new node, or the limit has passed."""
    limit = rank.exchange.timeout
    if rank.number == 0:
        print(
            f' sparse ckpt | waits up to {limit.total_seconds() / 60:g} minutes for more nodes | '
            f'{missing} |',
            flush=True,
        )
    _listen_to_signals()
    launcher, deadline = os.getppid(), time.monotonic() + limit.total_seconds()
    while os.getppid() == launcher and time.monotonic() < deadline:
        time.sleep(_LOOKS_FOR_ITS_LAUNCHER_S)


def _listen_to_signals() -> None:
    """Let signals end this process: handlers act after an iteration, and none runs."""
    if threading.current_thread() is threading.main_thread():
        for number in ASKING:
            signal.signal(number, signal.SIG_DFL)


def _end(rank: Rank, missing: NodesMissing) -> None:
    """End the launcher, too, so that the program that started it can try again."""
    if rank.number == 0:
        logger.error('the job ends, to be started again: %s', missing)
        with suppress(DistError):  # the launcher may be gone
            store = launcher_store(_STORE_TIMEOUT)
            if store is not None:
                write_needed_ranks(store, missing.ranks)
    rank.exchange('job-ends', b'')  # rank 0 may serve the store
    announce(rank.number, EXIT_WHOLE_JOB)
    end_at_once(EXIT_WHOLE_JOB)


class OtherLayouts:
    """Windows of the run's other layouts; none without `--sparse-ckpt-elastic`."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._shelf = None if rank.config.elastic == OFF else shelf_of(rank.config, rank.run_id)
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

    def require_nodes(self, own: whole_job.Predecessor) -> None:
        """Refuse to continue while missing nodes have parts of newer windows.

        Collective. See `found.require_parts`, and with `--sparse-ckpt-elastic-exact`
        `found.require_exact`. If the launcher can still get nodes, this waits for them first. `own`
        are the windows of this layout.
        """
        newest, config = _newest(own), self._rank.config
        try:
            if not config.forget:
                found.require_parts(self._elsewhere, newest)
            if config.elastic_exact and self._elsewhere.dense_at > newest:
                found.require_exact(self.candidates[0], surplus.started(self._rank.world_size))
        except found.NodesMissing as missing:
            without_nodes(self._rank, missing)
            raise

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
            if self._rank.number == 0:
                surplus.let_go()

        memory.forget_other_layouts = forget
        if disk is not None:
            disk.forget_other_layouts = lambda: shelf.remove_on_disk(runs)

    def _useless(self, shelf: Shelf) -> list[str]:
        """Directories to free; a process that has joined a running job has not searched before."""
        try:
            return take_stock(self._rank.identity, self._rank.config, shelf).runs
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
            self._rank, self._shelf, self._elsewhere, memory, trainer.operators, trainer.resharding,
            own.history,
        )  # fmt: skip
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
