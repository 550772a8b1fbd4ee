# SPDX-License-Identifier: Apache-2.0
"""Sparse checkpointing of one training job on one rank, from set-up to the end.

Set-up finds the windows of a predecessor and prepares host memory; then one of three modes runs the
training loop: `UnprotectedMode`, `WholeJobMode` or `LocalizedMode`.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self

import psutil
import torch

from moevement_ext.config import (
    LOCALIZED,
    OFF,
    ConfigurationError,
    SparseCheckpointConfig,
    is_export,
    reads_memory,
)
from moevement_ext.errors import EXIT_STUCK, HostMemoryError, UserError
from moevement_ext.events import Finished, ProtectionReduced, RecoveryStarted, WorkerStarted
from moevement_ext.job import before_training, metrics, modes, own_device
from moevement_ext.job.before_training import leave_for_successors, node_store, reserve_early
from moevement_ext.job.digest_file import digest_of_bytes, digest_of_slices, write_digest
from moevement_ext.job.ending import LastBarrier, end, trained_together
from moevement_ext.job.joining import connect, join_launched, own_store
from moevement_ext.job.loop_entry import LoopEntry
from moevement_ext.job.other_layouts import OtherLayouts
from moevement_ext.logger import logger_of
from moevement_ext.membership.membership import Membership
from moevement_ext.membership.rank import Rank
from moevement_ext.membership.rendezvous import RoundEnded
from moevement_ext.membership.standstill import Guard
from moevement_ext.memory.budget import NOTHING_LOGGED
from moevement_ext.memory.disk import DiskWindows
from moevement_ext.memory.mapped_file import forget_prepared_maps
from moevement_ext.memory.window.name import History, WindowName
from moevement_ext.memory.window.refusal import UnreadableWindow
from moevement_ext.memory.window.slot import SlotHeader
from moevement_ext.plan.strategy.choice import disk_only
from moevement_ext.protect.planner import Planner
from moevement_ext.protect.protection import Protection, Reserved
from moevement_ext.recover import whole_job
from moevement_ext.recover.after_steps import AfterSteps
from moevement_ext.recover.own_report import handovers
from moevement_ext.recover.trainer import Trainer
from moevement_ext.regroup import nccl_environment
from moevement_ext.system import leaving, watchdog
from moevement_ext.system.nvml import DeviceWatch

logger = logger_of(__name__)


_TIMEOUT = timedelta(minutes=10)


class Job:
    """Sparse checkpointing in this process; the training thread calls the methods.

    Custom loops call `join`. Construct it before the first process group, as it sets NCCL's
    environment variables. As a context manager it ends the job on all ranks: after the last
    iteration host memory is freed when all processes end well; after another end windows remain.
    Raises `UserError` if `--sparse-ckpt-disk` is not usable.

    Args:
        rank: this rank.
        membership: of this rank; None if a failure restarts the whole job.
        store: for `torch.distributed`; None: torch creates its own.

    Attributes:
        keeps_windows: windows remain after the end; None: only if the end precedes the last
            iteration.
        entry: the current call of the loop.
        after_steps: work between iterations; a trainer has it as its `loop`, or in that.
    """

    def __init__(
        self,
        rank: Rank,
        membership: Membership | None,
        store: torch.distributed.Store | None = None,
    ) -> None:
        if membership is not None and rank.backend == nccl_environment.BACKEND:
            nccl_environment.prepare()
        self.rank = rank
        self.membership = membership
        self.store = store
        self.keeps_windows: bool | None = None
        self.entry = LoopEntry()
        self.after_steps = AfterSteps(self._trust)
        self.joining = membership is not None and membership.joining
        """This process replaces a lost one in a running job."""
        self.reserved: Reserved | None = None
        self.protection: Protection | None = None
        self._disk = self._open_disk()
        self._on_disk: WindowName | None = None
        self._history = ''
        self._layouts = OtherLayouts(rank)
        self._restart: modes.Restart | None = None
        self._mode: modes.UnprotectedMode | modes.WholeJobMode | None = None
        self._guard: Guard | None = None
        self._device_watch: DeviceWatch | None = None
        self._watchdog: watchdog.Watchdog | None = None
        self._last_barrier: LastBarrier | None = None
        self._observer = metrics.observe(rank)
        start_up_s = time.time() - psutil.Process().create_time()
        rank.events.emit(WorkerStarted(start_up_s=start_up_s))

    # Set-up

    @classmethod
    def join(
        cls,
        config: SparseCheckpointConfig,
        settings: Mapping[str, object],
        backend: str = 'nccl',
        timeout: timedelta = _TIMEOUT,
    ) -> Self:
        """Rendezvous with the other ranks of the launcher and connect `torch.distributed`.

        The process selects the GPU with index `LOCAL_RANK`, unless it has already selected
        a GPU.

        Args:
            config: settings of sparse checkpointing.
            settings: all that can change bits, by name; windows of other settings are refused.
            backend: of `torch.distributed`: nccl, or gloo without a GPU.
            timeout: limit of a collective and of the rendezvous.

        Raises:
            UserError: a setting breaks a rule, or this process has other settings than the job
                that it joins.
        """
        own_device.take()
        leaving.leave_in_any_case()
        job = cls(*join_launched(config, settings, backend, timeout))
        job.init_process_group(timeout)
        return job

    def init_process_group(self, timeout: timedelta) -> None:
        """Replace `torch.distributed.init_process_group`, whose groups survivors cannot reconnect.

        A process that joins a running job connects to no other rank before training; until
        then it has fake process groups.
        """
        connect(self.rank, self.store, self.joining, timeout)

    def set_up(
        self,
        build: Callable[[bool], Trainer],
        load_dense: Callable[[], None] | None = None,
        dense_iteration: int = -1,
        last_iteration: int | None = None,
    ) -> None:
        """Build the trainer; recover from host memory if that is best. Collective.

        Args:
            build: builds the trainer; the argument is True to load the newest dense checkpoint.
            load_dense: loads the dense checkpoint into `trainer`, if recovery from memory proves
                impossible; may be None if there is none.
            dense_iteration: iteration of the dense checkpoint, -1 if there is none.
            last_iteration: iteration at which training ends, None if unknown.

        Raises:
            UserError: an export finds no window, or this layout cannot continue the previous one;
                or the dense checkpoint is not, or could not be, loaded.
            HostMemoryError: host memory cannot be set up, although there are windows to recover
                from or protection is required.
        """
        before_training.refuse_without_load(load_dense, dense_iteration)
        predecessor, find_s = self._find(dense_iteration, last_iteration)
        found = predecessor is not None and bool(predecessor.candidates or self._layouts.candidates)
        if not found:
            self._refuse_without_window()
        reserving = reserve_early(self.rank, self.membership) if self.joining else None
        self.trainer = build(not (self.joining or found))
        self.trainer.operators.renew()
        self.planner = Planner(self.rank, self.trainer.operators, self.trainer.place)
        if reserving is not None:
            reserving.wait()
        self._protect(required=self.joining or found)
        forget_prepared_maps()
        if not self.joining and self.reserved is not None:
            leave_for_successors(self.rank, self.membership, self.reserved.memory.store)
        if predecessor is not None and found:
            self._restart = self._obtain(predecessor, find_s)
            if self._restart is None:
                self._refuse_without_window()
                if load_dense is not None:
                    load_dense()
                    self.trainer.operators.renew()
        if not self.joining and self._restart is None:
            before_training.check_loaded(self.trainer.iteration, dense_iteration)
        self._continue_on_disk(predecessor)

    def _find(
        self, dense_iteration: int, last_iteration: int | None
    ) -> tuple[whole_job.Predecessor | None, float]:
        """An earlier start's windows, None if joining, and the seconds of the search."""
        if self.joining:
            return None, 0.0
        began = time.perf_counter()
        elsewhere = self._layouts.find(dense_iteration, last_iteration)
        found = whole_job.find(
            node_store(self.rank), self._disk, self.rank, dense_iteration, last_iteration, elsewhere
        )
        self._history = found.history
        self._layouts.require(found)
        return found, time.perf_counter() - began

    def _refuse_without_window(self) -> None:
        """End an export, instead of training from scratch, which would overwrite the windows."""
        if is_export() and not self.joining:
            raise UserError(
                f'export: no window of the run {self.rank.run_id} in '
                f'{self.rank.config.disk or self.rank.config.dir} fits these flags; after -- give '
                'the command that launched the run, with the same flags.'
            )

    def _open_disk(self) -> DiskWindows | None:
        """Open the disk directory; a process that joins a running job may go on without it."""
        if self.rank.config.disk is None:
            return None
        try:
            root = Path(self.rank.config.disk)
            return DiskWindows(root, self.rank.run_id, self.rank.number, self.joining)
        except UserError as error:
            if not self.joining or disk_only(self.rank.config):
                raise
            what = f'no rank copies windows to disk while this one cannot: {error}'
            self.rank.events.reduced(what)
            return None

    def _continue_on_disk(self, predecessor: whole_job.Predecessor | None) -> None:
        """Set aside on-disk windows newer than the one that this run resumes from."""
        if self._disk is None or predecessor is None:
            return
        start = -1 if self._restart is None else self._restart.conversion.window.start
        try:
            self._disk.set_aside_after(start, self.rank.identity)
        except (OSError, UnreadableWindow) as error:
            self.rank.events.reduced(f'windows on disk: {error}')
        kept = (window.name for window in predecessor.on_disk if window.start <= start)
        self._on_disk = next(kept, None)

    def _protect(self, required: bool) -> None:
        """Reserve host memory and connect to the peers; if that fails, training is unprotected.

        With `required` it raises instead, since unprotected training would lose the windows
        found.
        """
        trainer, config = self.trainer, self.rank.config
        own_device.bind()
        try:
            self.reserved = Reserved(
                self.rank,
                self.planner,
                trainer.operators,
                trainer.tokens,
                trainer.auxiliary_state.max_bytes,
                trainer.pipeline.logged if self._logs else NOTHING_LOGGED,
                self._disk,
            )
        except HostMemoryError as error:  # on all ranks or on none
            if required or config.strict or config.host_memory_gb is not None:
                raise
            self.rank.events.emit(ProtectionReduced(reason=str(error)))
            logger.warning('TRAINING IS UNPROTECTED: %s', error)
            return
        self._layouts.keep_until_replaced(self.reserved.memory, self._disk)
        if self.reserved.memory.first_on_node():
            print(f' sparse ckpt | {self.reserved.memory.describe()} |', flush=True)

    @property
    def _logs(self) -> bool:
        """True if the upstream log is needed, as a stage may replay alone."""
        return self.membership is not None and self.rank.config.recovery == LOCALIZED

    def _obtain(self, predecessor: whole_job.Predecessor, find_s: float) -> modes.Restart | None:
        """Fetch and verify the window to convert; set the data position to the replay's start."""
        assert self.reserved is not None  # it was required
        memory = self.reserved.memory
        began = time.perf_counter()
        captured: list[SlotHeader] = []
        conversion = self._layouts.obtain(memory, self.trainer, predecessor)
        if conversion is not None:  # nothing of another layout has the same bits
            predecessor = replace(predecessor, candidates=[], committed=-1)
        elif predecessor.candidates:
            captured = self.reserved.captured_after(predecessor.candidates[0].start)
            check = self.trainer.operators.check
            conversion = whole_job.obtain(memory, predecessor, self.rank, check)
        if conversion is None:
            return None
        seconds = {'find': find_s, 'obtain': time.perf_counter() - began}
        first, last = conversion.first, conversion.last
        started = RecoveryStarted(
            start=first.iteration, dense_at=last.iteration, source=conversion.tier
        )
        self.rank.events.emit(started)
        # The data iterators are built next: training data from the start of the replay,
        # validation data from its end (a replay does not evaluate).
        self.trainer.auxiliary_state.set_counters(first.state, validation=last.state)
        ledger, newest = memory.ledger, predecessor.committed
        wanted = self.rank.config.verify != OFF
        recorded = ledger.entries(first.iteration, newest) if wanted else []
        return modes.Restart(predecessor, conversion, captured, recorded, seconds)

    # Training

    def train(self, run: Callable[[], Any]) -> Any:
        """Run the training loop from the window's dense iteration; call it again after failures.

        The loop `run` calls `step` for every iteration.
        """
        before_training.check_limits(self.rank, self.reserved, self.joining)
        if self.membership is not None:
            self.membership.wait_for_first_rendezvous()
        else:
            self._guard = before_training.guarded(self.rank)
        if watchdog.is_launched():
            config, kept_in, says = self.rank.config, None, False
            if watchdog.under_torchrun():  # other launchers say themselves what remains
                kept_in, says = self.kept_in, self.rank.number == 0  # one line per job
            self._watchdog = watchdog.Watchdog(
                config.hang_timeout, kept_in, says, config.stuck_timeout
            )
        watchdog.set_up_is_over()
        self._device_watch = own_device.watch(self.rank.events, self._lose_device)
        self._mode = self._start()
        if self._observer is not None and self.protection is not None:
            self._observer.watch(self.protection.figures, self.trainer.last_iteration)
        if not isinstance(self._mode, modes.UnprotectedMode):
            mode = self._mode
            self.trainer.around_update(mode.before_update, mode.updating, mode.stepped)
        return self._mode.train(partial(self.entry.enter, run))

    @property
    def iteration(self) -> int:
        """Number of committed iterations; the loop continues from here."""
        return self.trainer.iteration

    def step(self, iteration: int | None = None) -> Any:
        """Run the iteration after `iteration` (None: the trainer's), after any pending recovery.

        Returns the last result of `Trainer.iterate`, or `LOOP_ENDS`. Raises
        `ConfigurationError` if training has not begun, or is over.
        """
        with self.entry.step():
            if self._mode is None or (
                iteration is None and self.iteration >= self.trainer.last_iteration
            ):
                raise ConfigurationError(
                    'job.step was called outside of the loop given to job.train, or after its last '
                    'iteration. A loop steps while job.iteration is below that, since it is called '
                    'again after a failure.'
                )
            if iteration is not None:  # the adapter's loop, which runs what is due itself
                return self._mode.step(iteration)
            result = self._mode.step(self.iteration)
            if result is not modes.LOOP_ENDS:
                self.after_steps.run(self.iteration)
            return result

    def after_step(self, every: int, run: Callable[[int], Any]) -> None:
        """Have `step` call `run(iteration)` at its end, after every `every`-th iteration.

        For evaluations and checkpoints of the loop's own, on all ranks, which register the same
        before `train`. What a failure of another rank cuts off runs again on all ranks after the
        recovery, so that all complete it; some ranks may run it twice.
        """
        self.after_steps.add(every, run)

    def _trust(self) -> None:
        """Raise `RoundEnded` if NCCL's waits may have returned undefined data."""
        if self.membership is not None:
            self.membership.synchronize()
            if self.membership.waits_returned:
                raise RoundEnded('another rank was lost in a step after an iteration')

    def _lose_device(self, what: str) -> None:
        """End this process, so that the launcher starts a replacement. Any thread."""
        if self.membership is not None:
            self.membership.lose_device(what)
        if self._guard is not None:
            self._guard.lose_device(what)
        os._exit(EXIT_STUCK)

    def _start(self) -> modes.UnprotectedMode | modes.WholeJobMode:
        """Start capturing, with the running job's plan if joining, otherwise with a new plan."""
        reserved, restart, last = self.reserved, self._restart, self.trainer.last_iteration
        if reserved is None:
            return modes.UnprotectedMode(self.trainer)
        store = own_store(self.membership, self.rank)
        if self.membership is not None and self.joining:
            in_force = handovers(self.membership.reports)[0]
            plan = reserved.agreed_plan(in_force.version, in_force.origin, store)
            self.protection = Protection(reserved, plan, store, last)
            return self._protected(self.protection)
        if restart is not None:
            self.trainer.auxiliary_state.set_counters(restart.conversion.last.state)
        self.trainer.loop.start()
        origin = iteration = self.trainer.iteration
        if restart is not None and reserved.stops:
            iteration = restart.catches_up_to  # what was recorded until then judges
            origin = iteration + 1  # which is committed once all ranks have judged
        reserved.memory.ledger.forget_after(iteration)  # entries of an abandoned history
        self.protection = protection = Protection(
            reserved,
            reserved.first_plan(origin),
            store,
            last,
            self._on_disk,
            forget_former_places=not reads_memory(),
        )
        base = None if restart is None else restart.conversion.window
        protection.checkpointer.history = History(self._history, base)
        if restart is not None:
            conversion = restart.conversion
            if not protection.stops:  # else once the recovery is judged
                protection.room_for_recovery(conversion.window.start, restart.catches_up_to)
                protection.windows.go_back_to(conversion.window)
            protection.windows.replicate_again(conversion.window, conversion.file())
            restart.tokens_lost = modes.tokens_lost(self.rank, protection, conversion)
        else:
            protection.windows.forget_the_past()
        return self._protected(protection)

    def _protected(self, protection: Protection) -> modes.WholeJobMode:
        if self.membership is not None:
            protection.persistence.on_over = self.membership.end_soon
        if not self.joining:
            number = 0 if self.membership is None else self.membership.taken.round
            protection.persistence.enter(number, protection.persistence.at_start)
        if self.membership is None:
            guard, outside = self._guard, self.rank.config.store is not None
            lost = guard.store_lost if guard is not None and outside else None
            return modes.WholeJobMode(self.rank, self.trainer, protection, self._restart, lost)
        membership = self.membership
        protection.stop_waiting_if(lambda: membership.broken)
        return modes.LocalizedMode(self.rank, self.trainer, protection, self._restart, membership)

    def failed(self) -> None:
        """Handle an error of the program; if another rank caused it, all workers restart."""
        if self._mode is not None:
            self._mode.failed()

    # The end

    @property
    def restarted(self) -> bool:
        """True if this run of the whole job continues from windows of an earlier one."""
        return self._restart is not None

    @property
    def committed_before(self) -> int:
        """Iterations committed in the continued earlier run, -1 if there is none."""
        return -1 if self._restart is None else self._restart.catches_up_to

    @property
    def recovering(self) -> bool:
        """True if the next step must recover the state first. Training thread."""
        return self._mode is not None and self._mode.recovering

    @property
    def committed(self) -> int:
        return self.rank.events.iteration

    @property
    def kept_in(self) -> Path | None:
        """Directory of this rank's windows, None while training is unprotected."""
        return None if self.reserved is None else self.reserved.memory.store.path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._finish()
        except Exception as late:
            error = late
            raise
        finally:
            if isinstance(error, Exception):
                self.failed()

    def _finish(self) -> None:
        keeps = self.keeps_windows
        if keeps is None:
            keeps = self._mode is None or self.iteration < self.trainer.last_iteration
        if keeps:
            self.part()
        self.end_together()
        self.finish(0, remove=not keeps)

    def end_together(self) -> None:
        """Wait until all ranks have trained; raises `RoundEnded` if a rank was lost before."""
        self._last_barrier = trained_together(self.rank, self.membership)

    def finish(self, code: int, remove: bool) -> None:
        """End protection; with `remove` host memory is freed once all processes end with `code`."""
        self._stop()
        act = partial(end, self.rank, self._last_barrier, code, remove, self.close)
        leaving.last_acts.append(act)

    def write_digest(self, path: str) -> None:
        """Write SHA-256 digests of the state, for `tools.compare_digests`. Collective."""
        operators, state = self.trainer.operators, self.trainer.auxiliary_state.now()
        entries = digest_of_slices(operators.slices) | {'auxiliary state': digest_of_bytes(state)}
        write_digest(path, self.iteration, entries)

    def part(self) -> None:
        """Before a planned end, if elastic, keep the state for any layout. All ranks call this."""
        if self.protection is not None and not self.recovering:
            self._layouts.part(self.protection, self.trainer, self.committed)

    def _stop(self) -> None:
        for copying in (self.protection, self.membership):
            if copying is not None:
                copying.stop()
        for part in (self._device_watch, self._guard, self._watchdog):
            if part is not None:
                part.close()

    def close(self, remove: bool = True) -> None:
        """Stop all threads; with `remove` free host memory, unless an export has read it."""
        remove = remove and not reads_memory()
        self._stop()
        if self.reserved is not None:
            self.reserved.close(remove, keep_disk=is_export())
        self.rank.events.emit(Finished(removed=remove))  # no thread is left
        for part in (self._observer, self._disk, self.membership, self.rank.events):
            if part is not None:
                part.close()
