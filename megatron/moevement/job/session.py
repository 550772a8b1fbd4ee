# SPDX-License-Identifier: Apache-2.0
"""One rank's view of a protected Megatron job, from the rendezvous to the end of the job.

Creates the engine's job for Megatron's model, optimizer and data. `upstream_trainer` and
`attachment` connect the session to a loop.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
from megatron.core.utils import get_model_config

from megatron.moevement.facts import Built, Counters, JobFacts, Settings
from megatron.moevement.job import identity, reports
from megatron.moevement.job.flags import hazard, not_localized
from megatron.moevement.job.megatron_loop import OperationCount, Surroundings
from megatron.moevement.job.megatron_trainer import MegatronTrainer
from megatron.moevement.job.named_files import refuse_missing
from megatron.moevement.job.reports import describe
from megatron.moevement.seams import datasets, expert_slots, upstream
from megatron.moevement.seams.data_position import DataPosition
from megatron.moevement.seams.post_step import PostStep
from megatron.moevement.seams.schedules import Losses
from megatron.moevement.state.global_scalars import ScalarRecorder, check_room
from megatron.moevement.state.routes import OWN_LOOP, Routes, not_routed
from megatron.moevement.state.training_state import TrainingState
from moevement_ext.config import OFF, SparseCheckpointConfig
from moevement_ext.events import LossLogged
from moevement_ext.job.ending import announce
from moevement_ext.job.job import Job
from moevement_ext.job.joining import join
from moevement_ext.logger import logger_of

logger = logger_of(__name__)


@dataclass(eq=False)
class Session:
    """A protected Megatron job in this process. Training thread only.

    Attributes:
        alone: contexts of a joining process, which connects to no other rank before training.
    """

    job: Job
    _facts: JobFacts
    _counters: Counters
    around: Surroundings

    def __post_init__(self) -> None:
        self.job.keeps_windows = False
        self.alone = ExitStack()
        self._trainer: MegatronTrainer | None = None

    def set_up(
        self,
        build: Callable[[bool], Built],
        load_dense: Callable[..., None],
        dense_iteration: int,
    ) -> Built:
        """Build model chunks, optimizer and scheduler; recover from host memory if it is newest.

        Args:
            build: builds all three; its argument says whether to load the newest dense checkpoint.
            load_dense: loads that checkpoint into the built objects, after a recovery from memory
                proved impossible.
            dense_iteration: iteration of that checkpoint, -1 if there is none; ignored by a process
                that joins a running job.

        Raises:
            SparseCheckpointError: the type of optimizer or model is unknown, or there are more
                optimizers than the ledger can record.
        """

        def build_trainer(with_dense: bool) -> MegatronTrainer:
            with upstream.groups_of_all_ranks(self.job.rank.exchange):
                model, optimizer, scheduler = build(with_dense)
            check_room(optimizer, upstream.detaches_heads(get_model_config(model[0])))
            config = self.job.rank.config
            self._trainer = MegatronTrainer(
                self._facts,
                self._counters,
                TrainingState(model, optimizer, scheduler, config.freezes),
                self.around,
                localized=self.job.membership is not None,
                placed=None if config.elastic == OFF else self.job.rank.identity.placed,
                rebalance=config.expert_rebalance,
            )
            if not self.job.joining:
                self._trainer.replicas.equalize()
            return self._trainer

        self.job.set_up(
            build_trainer,
            lambda: load_dense(*self._built()),
            dense_iteration,
            self._counters.train_iters,
        )
        self.around.post_step.pass_exits(self.job.committed_before)
        return self._built()

    def train(self, run: Callable[[], object]) -> object:
        """Run the training loop from the start of a dense window; again after failures."""
        self.alone.close()
        self.trainer.loop.note_start()
        return self.job.train(run)

    def step(self, train_step: Callable[..., object], iteration: int) -> object:
        """Run the iteration after `iteration`, after pending recovery work.

        Calls `train_step(iteration=, **schedule)`, for several iterations in a replay; `schedule`
        holds keywords for the pipeline schedule. Returns the last result, or `LOOP_ENDS`.
        """
        self.trainer.use(train_step)
        return self.job.step(iteration)

    def report(self, iteration: int) -> None:
        """Log the state of protection, if `iteration` ends a log interval."""
        if self.job.protection is not None and iteration % self._facts.log_interval == 0:
            reports.log_interval(iteration, self.job.protection.checkpointer)

    def report_loss(self, iteration: int, loss: torch.Tensor | float | None) -> None:
        """Emit the loss of `iteration` as an event, if it ends a log interval. Last rank only."""
        facts = self._facts
        if facts.rank == facts.world_size - 1 and iteration % facts.log_interval == 0:
            if loss is not None:
                self.job.rank.events.emit(LossLogged(loss=float(loss)))

    def leave_before_recovery(self) -> NoReturn:
        """Exit because the loop ended before the step that recovers the state, which is unusable.

        Raises:
            SystemExit: status 0; the next launch of the job resumes from its windows.
        """
        self.say_kept()
        announce(self._facts.rank, 0)
        sys.exit(0)

    def say_kept(self) -> None:
        """Print the directory of windows that outlive the job, if there are any."""
        kept, is_last = self.job.kept_in, self._facts.rank == self._facts.world_size - 1
        if kept is not None and is_last:
            print(reports.exit_line(self._counters.iteration, False, kept.parent), flush=True)

    @property
    def trainer(self) -> MegatronTrainer:
        """The trainer of the built model."""
        assert self._trainer is not None  # `set_up` comes first
        return self._trainer

    def _built(self) -> Built:
        training = self.trainer.operators
        return training.model, training.optimizer, training.scheduler


@contextmanager
def protected_job(
    settings: Settings,
    facts: JobFacts,
    counters: Counters,
    config: SparseCheckpointConfig,
    data: DataPosition,
    operations: OperationCount,
    own_loop: bool = False,
) -> Iterator[Session]:
    """Join the other ranks, and exit together with them. Around all use of `torch.distributed`.

    Training thread of every rank. Host memory is freed when the context ends normally; after an
    exception it stays, and the next launch of the job recovers from it. `own_loop`: the loop is not
    upstream's.

    Raises:
        ConfigurationError: this node lacks a file that all ranks read.
    """
    refuse_missing(settings, facts.rank)
    if config.expert_slots:
        expert_slots.refuse(settings, config, own_loop)
    danger = hazard(settings)
    if danger and facts.rank == 0:
        logger.warning('%s', danger)
    run_id = identity.run_name(settings, config)
    rank_identity = identity.rank_identity(settings, facts.rank, config)
    joined = join(
        rank_identity,
        facts.world_size,
        run_id,
        facts.distributed_backend,
        config,
        facts.timeout,
        not_localized(settings),
    )
    job = Job(*joined)
    around = Surroundings(
        recorder=ScalarRecorder(),
        data=data,
        post_step=PostStep(facts, counters),
        operations=operations,
        losses=Losses(),
        after_steps=job.after_steps,
    )
    session = Session(job, facts, counters, around)
    if facts.rank == 0:
        job.rank.events.emit(describe(settings, facts, counters))
    around.recorder.install()
    _install_routes(session, OWN_LOOP if own_loop else not_routed(settings, config))
    around.losses.install()  # after routes, which run a schedule several times
    datasets.install()
    if config.expert_slots:
        expert_slots.ExpertSlots(config.expert_slots, config.expert_replicas).install()
    if session.job.joining:
        session.alone.enter_context(upstream.without_connections(facts.distributed_backend))
    with session.job:
        yield session
    if session.job.keeps_windows:
        session.say_kept()  # no thread captures any more


def _install_routes(session: Session, reason: str | None) -> None:
    membership = session.job.membership
    if membership is None or session.job.rank.config.routes == OFF:
        return

    def guests() -> list[int]:
        return [rank for rank, report in enumerate(membership.reports) if report.guest]

    def stage_of() -> list[int]:
        assert session.job.protection is not None  # training has begun
        return session.job.protection.planner.stage_of

    Routes(reason, guests, stage_of, lambda: session.trainer.operators.operators).install()
