# SPDX-License-Identifier: Apache-2.0
"""Sparse checkpointing of one training job, from set-up to its end, seen from one rank.

Set-up finds the windows of a predecessor and prepares host memory; then one of three modes runs the
training loop: `unprotected`, `whole_job` or `localized`.
"""

import logging
import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch

from moevement_ext.config import LOCALIZED, OFF, node_name
from moevement_ext.devices.watch import DeviceWatch
from moevement_ext.errors import EXIT_STUCK, HostMemoryError, UserError
from moevement_ext.events import Finished, ProtectionReduced, RecoveryStarted, WorkerStarted
from moevement_ext.job import own_device
from moevement_ext.job.exporting import is_export, reads_memory, refuse_without_window
from moevement_ext.job.localized_mode import LocalizedMode
from moevement_ext.job.unprotected_mode import UnprotectedMode
from moevement_ext.job.whole_job_mode import Restart, WholeJobMode
from moevement_ext.membership.guard import Guard
from moevement_ext.membership.membership import Membership
from moevement_ext.membership.rank import Rank
from moevement_ext.membership.rendezvous import launcher_store
from moevement_ext.memory import limits
from moevement_ext.memory.disk import DiskWindows
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.sizing import NOTHING_LOGGED
from moevement_ext.memory.window.name import WindowName
from moevement_ext.metrics import observer as metrics
from moevement_ext.process import watchdog
from moevement_ext.protect.planner import Planner
from moevement_ext.protect.protection import Protection
from moevement_ext.recover import whole_job
from moevement_ext.recover.giving_up import start_the_whole_job_again
from moevement_ext.recover.handover import handovers
from moevement_ext.recover.trainer import Trainer
from moevement_ext.regroup import nccl_environment, waits
from moevement_ext.replicate.secret import UnknownSecretError

logger = logging.getLogger(__name__)

_STORE_TIMEOUT = timedelta(seconds=60)

AroundUpdate = Callable[[Callable[[], None], Callable[[], None], Callable[[bool], None]], None]


class Job:
    """All of sparse checkpointing in this process; the training thread calls the methods.

    Made before the first process group: it sees to what NCCL must find in the environment.

    Args:
        rank: this rank.
        membership: this process among the others; None where a failure restarts the whole job.

    Raises:
        UserError: windows cannot be kept in `--sparse-ckpt-disk`.
    """

    def __init__(self, rank: Rank, membership: Membership | None) -> None:
        if membership is not None and rank.backend == nccl_environment.BACKEND:
            nccl_environment.prepare()
        self.rank = rank
        self.membership = membership
        self.joining = membership is not None and membership.joining
        """This process takes the place of a lost one in a running job."""
        self.protection: Protection | None = None
        self._disk = self._open_disk()
        self._on_disk: WindowName | None = None
        self._restart: Restart | None = None
        self._mode: UnprotectedMode | WholeJobMode | None = None
        self._guard: Guard | None = None
        self._device_watch: DeviceWatch | None = None
        self._watchdog: watchdog.Watchdog | None = None
        self._observer = metrics.observe(rank)
        start_up_s = time.time() - psutil.Process().create_time()
        rank.events.emit(WorkerStarted(start_up_s=start_up_s))

    # Set-up

    def set_up(
        self,
        build: Callable[[bool], Trainer],
        load_dense: Callable[[], None],
        dense_iteration: int = -1,
        last_iteration: int | None = None,
    ) -> None:
        """Build what is trained; recover from host memory where that is best. Collective.

        Args:
            build: builds it; told whether to load the newest dense checkpoint as well.
            load_dense: loads it into what was built, after a recovery from memory proved
                impossible.
            dense_iteration: of that checkpoint, -1 if there is none.
            last_iteration: at which training ends, None if that is not known yet.

        Raises:
            UserError: an export finds no window.
            HostMemoryError: there are windows to recover from, or protection is demanded, but host
                memory cannot be set up.
        """
        predecessor, find_s = self._find(dense_iteration, last_iteration)
        found = predecessor is not None and bool(predecessor.candidates)
        if not found:
            self._refuse_without_window()
        self.trainer = build(not (self.joining or found))
        self.planner = Planner(self.rank, self.trainer.operators, self.trainer.place)
        self._protect(required=self.joining or found)
        if predecessor is not None and found:
            self._restart = self._obtain(predecessor, find_s)
            if self._restart is None:
                self._refuse_without_window()
                load_dense()
        self._continue_on_disk(predecessor)

    def _find(
        self, dense_iteration: int, last_iteration: int | None
    ) -> tuple[whole_job.Predecessor | None, float]:
        """What an earlier life of the whole job left; a joining process takes part in this one."""
        if self.joining:
            return None, 0.0
        began = time.perf_counter()
        store = NodeStore(Path(self.rank.config.dir), self.rank.run_id, node_name())
        found = whole_job.find(store, self._disk, self.rank, dense_iteration, last_iteration)
        return found, time.perf_counter() - began

    def _refuse_without_window(self) -> None:
        if not self.joining:
            refuse_without_window(self.rank.config.disk or self.rank.config.dir, self.rank.run_id)

    def _open_disk(self) -> DiskWindows | None:
        """The disk of this rank; one that joins a running job goes on without it if need be."""
        if self.rank.config.disk is None:
            return None
        try:
            root = Path(self.rank.config.disk)
            return DiskWindows(root, self.rank.run_id, self.rank.number)
        except UserError as error:
            if not self.joining:
                raise
            self._without_disk(str(error))
            return None

    def _without_disk(self, reason: str) -> None:
        self.rank.events.emit(ProtectionReduced(reason=reason))
        logger.warning('sparse checkpointing: protection is reduced: %s', reason)

    def _continue_on_disk(self, predecessor: whole_job.Predecessor | None) -> None:
        """Nobody recovers any more from windows on disk after the one that this life starts from.

        They belong to a past that is not continued.
        """
        if self._disk is None or predecessor is None:
            return
        start = -1 if self._restart is None else self._restart.conversion.window.start
        try:
            self._disk.set_aside_after(start, self.rank.identity)
        except OSError as error:
            self._without_disk(f'windows on disk: {error}')
        kept = (window.name for window in predecessor.on_disk if window.start <= start)
        self._on_disk = next(kept, None)

    def _protect(self, required: bool) -> None:
        """Reserve host memory and connect to the peers; without it training is unprotected.

        Args:
            required: there are windows to recover from; going on without them would lose progress.
        """
        trainer, config = self.trainer, self.rank.config
        if config.bind != OFF:
            own_device.bind()
        try:
            self.protection = Protection(
                self.rank,
                self.planner,
                trainer.operators,
                trainer.tokens,
                trainer.small_state.max_bytes,
                trainer.pipeline.logged if self._logs else NOTHING_LOGGED,
                self._disk,
            )
        except UnknownSecretError as error:  # the others start again for the same reason
            start_the_whole_job_again(self.rank, str(error))
        except HostMemoryError as error:  # on all ranks or on none
            if required or config.strict or config.host_memory_gb is not None:
                raise
            self.rank.events.emit(ProtectionReduced(reason=str(error)))
            logger.warning('sparse checkpointing: TRAINING IS UNPROTECTED: %s', error)
            return
        if self.protection.memory.first_on_node():
            print(f' sparse ckpt | {self.protection.memory.describe()} |', flush=True)

    @property
    def _logs(self) -> bool:
        """A stage may have to replay alone."""
        return self.membership is not None and self.rank.config.recovery == LOCALIZED

    def _obtain(self, predecessor: whole_job.Predecessor, find_s: float) -> Restart | None:
        """Fetch and verify the window to convert; go to where its replay starts."""
        assert self.protection is not None  # it was required
        began = time.perf_counter()
        captured = self.protection.captured_after(predecessor.candidates[0].start)
        check = self.trainer.operators.check
        source = whole_job.obtain(self.protection.memory, predecessor, self.rank, check)
        if source is None:
            return None
        conversion = source.conversion
        seconds = {'find': find_s, 'obtain': time.perf_counter() - began}
        first, last = conversion.first, conversion.last
        started = RecoveryStarted(
            start=first.iteration, dense_at=last.iteration, source=source.tier
        )
        self.rank.events.emit(started)
        # The data iterators are built next: training data from where the replay starts,
        # validation data from where it ends (a replay does not evaluate).
        self.trainer.small_state.set_counters(first.state, validation=last.state)
        ledger, newest = self.protection.memory.ledger, predecessor.committed
        wanted = self.rank.config.verify != OFF
        recorded = ledger.entries(first.iteration, newest) if wanted else []
        return Restart(predecessor, conversion, source.tier, captured, recorded, seconds)

    # Training

    def train(self, run: Callable[[], Any], around_update: AroundUpdate) -> Any:
        """The training loop, started where the window becomes dense; again after failures.

        Args:
            run: the loop; every iteration of it goes through `step`.
            around_update: has every update of the optimizer call these: one before the first thing
                that writes what is captured (it waits until that is allowed), one right before the
                optimizer writes (gradients are complete then), one when it has written, told
                whether the update was skipped.
        """
        self._check_limits()
        if self.membership is None:
            self._guard = self._guarded()
        if watchdog.under_torchrun():
            says = self.rank.number == 0  # one line, not one a rank
            hang_timeout = self.rank.config.hang_timeout
            self._watchdog = watchdog.Watchdog(hang_timeout, self.kept_in, says)
        watchdog.set_up_is_over()
        self._device_watch = own_device.watch(self.rank.events, self._lose_device)
        self._mode = self._start()
        if self._observer is not None and self.protection is not None:
            self._observer.watch(self.protection.figures, self.trainer.last_iteration)
        if not isinstance(self._mode, UnprotectedMode):
            around_update(self._mode.before_update, self._mode.updating, self._mode.stepped)
        return self._mode.train(run)

    def step(self, iteration: int) -> Any:
        """The iteration after `iteration`, after what a failure has left to do.

        Returns:
            What `Trainer.iterate` returned last, or `LOOP_ENDS`.
        """
        assert self._mode is not None
        return self._mode.step(iteration)

    def _check_limits(self) -> None:
        """All is connected: what a recovery takes besides is known, and training has not begun.

        Raises:
            HostMemoryError: there is less, on this rank, and protection is demanded.
        """
        if self.protection is None or self.joining:
            return
        ranks, backend = len(self.protection.memory.plan.ranks), self.rank.backend
        for reason in limits.shortages(ranks, limits.over_infiniband(backend)):
            if self.rank.config.strict:
                raise HostMemoryError(reason)
            self.rank.events.emit(ProtectionReduced(reason=reason))
            logger.warning('sparse checkpointing: protection is reduced: %s', reason)

    def _guarded(self) -> Guard | None:
        """Hangs are noticed; None where no launcher's store is known. Collective."""
        pids = self.rank.exchange('pids', str(os.getpid()).encode())
        store = launcher_store(_STORE_TIMEOUT)
        if store is None:
            return None
        config = self.rank.config
        timeouts = config.hang_timeout, config.stuck_timeout
        waits.show()  # the guard ends who stands still, but for those that wait for others
        return Guard(store, self.rank.number, [int(pid) for pid in pids], *timeouts)

    def _lose_device(self, what: str) -> None:
        """End this process, so that its launcher starts another in its place. Any thread."""
        if self.membership is not None:
            self.membership.lose_device(what)
        if self._guard is not None:
            self._guard.lose_device(what)
        os._exit(EXIT_STUCK)

    def _start(self) -> UnprotectedMode | WholeJobMode:
        """Begin to capture, with the plan of the job this process joins or with a first one."""
        if self.protection is None:
            return UnprotectedMode(self.trainer)
        store = own_store(self.membership, self.rank)
        if self.membership is not None and self.joining:
            in_force = handovers(self.membership.reports)[0].plan
            self.protection.start(
                self.protection.agreed_plan(in_force.version, in_force.origin, store), store
            )
            return self._protected(self.protection)
        if self._restart is not None:
            self.trainer.small_state.set_counters(self._restart.conversion.last.state)
        self.trainer.loop.start()
        iteration = self.trainer.iteration
        self.protection.memory.ledger.forget_after(iteration)  # what another life committed
        plan = self.protection.first_plan(iteration)
        self.protection.start(plan, store, self._on_disk, forget_former_places=not reads_memory())
        if self._restart is not None:
            conversion = self._restart.conversion
            until = self._restart.catches_up_to
            self.protection.begin_trial(conversion.window, until, of_all=True)
            self.protection.windows.replicate_again(conversion.window, conversion.file())
        else:
            self.protection.forget_the_past()
        return self._protected(self.protection)

    def _protected(self, protection: Protection) -> WholeJobMode:
        if self.membership is None:
            lost = None
            if self._guard is not None and self.rank.config.store is not None:
                lost = self._guard.store_lost
            return WholeJobMode(self.rank, self.trainer, protection, self._restart, lost)
        membership = self.membership
        protection.windows.in_vain = lambda: membership.broken
        return LocalizedMode(self.rank, self.trainer, protection, self._restart, membership)

    def failed(self, error: Exception) -> None:
        """The program ends with an error; if it is another rank's, all workers start again."""
        if self._mode is not None:
            self._mode.failed(error)

    # The end

    @property
    def restarted(self) -> bool:
        """This life of the whole job goes on from windows of an earlier one."""
        return self._restart is not None

    @property
    def committed_before(self) -> int:
        """Iterations committed in the life that this one goes on from, -1 if there is none."""
        return -1 if self._restart is None else self._restart.catches_up_to

    @property
    def recovering(self) -> bool:
        """The state is not there before the next step, which brings it back. Training thread."""
        return self._mode is not None and self._mode.recovering

    @property
    def committed(self) -> int:
        """Iterations committed on this rank."""
        return self.rank.events.iteration

    @property
    def kept_in(self) -> Path | None:
        """Where windows of this rank are, None while training is unprotected."""
        return None if self.protection is None else self.protection.memory.store.path

    def close(self, remove: bool = True) -> None:
        """The end: stop all threads; with `remove` give the host memory back, if it is this run's.

        What an export has read stays.
        """
        remove = remove and not reads_memory()
        self.rank.events.emit(Finished(removed=remove))
        if self._device_watch is not None:
            self._device_watch.close()
        if self._observer is not None:
            self._observer.close()
        if self.protection is not None:
            self.protection.close(remove, keep_disk=is_export())
        if self._disk is not None:
            self._disk.close()
        if self._guard is not None:
            self._guard.close()
        if self.membership is not None:
            self.membership.close()
        if self._watchdog is not None:
            self._watchdog.close()
        self.rank.events.close()


def own_store(membership: Membership | None, rank: Rank) -> torch.distributed.Store:
    """The launcher's store under a name of this life of the job, by a connection of its own."""
    if membership is not None:
        return membership.archive
    default = torch.distributed.distributed_c10d._get_default_store()
    life = rank.exchange('life', secrets.token_hex(8).encode())[0].decode()
    return torch.distributed.PrefixStore(f'sparse-ckpt/{life}', default.clone())
