# SPDX-License-Identifier: Apache-2.0
"""A Megatron job from the rendezvous of its ranks to its end, for any training loop."""

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from megatron.moevement.counters import Counters
from megatron.moevement.facts import JobFacts, Settings
from megatron.moevement.job import identity
from megatron.moevement.job.description import describe
from megatron.moevement.job.local_files import refuse_missing
from megatron.moevement.job.session import Session
from megatron.moevement.job.surroundings import Surroundings
from megatron.moevement.job.unsupported import hazard, not_localized
from megatron.moevement.seams import patches
from megatron.moevement.seams.data_position import DataPosition
from megatron.moevement.seams.losses import Losses
from megatron.moevement.seams.post_step import PostStep
from megatron.moevement.state.global_scalars import ScalarRecorder
from megatron.moevement.state.operation_count import OperationCount
from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.job.job import Job
from moevement_ext.job.joining import join
from moevement_ext.job.surplus_rank import SurplusRank
from moevement_ext.system.exit_signal import listened_for

logger = logging.getLogger(__name__)


@contextmanager
def protected_job(
    settings: Settings,
    facts: JobFacts,
    counters: Counters,
    config: SparseCheckpointConfig,
    data: DataPosition,
    operations: OperationCount,
) -> Iterator[Session]:
    """Join the other ranks, and exit together with them. Around all use of `torch.distributed`.

    Training thread of every rank. Host memory is freed when the context ends normally; after an
    exception it stays, and the next launch of the job recovers from it.

    Args:
        settings: all settings of the job.
        facts: facts of the job.
        counters: counters of the loop.
        config: settings of sparse checkpointing.
        data: moves the data of this rank.
        operations: counts floating point operations.

    Raises:
        UserError: upstream is not a version that this package was checked against.
        ConfigurationError: this node lacks a file that all ranks read.
    """
    patches.check()
    refuse_missing(settings, facts.rank)
    danger = hazard(settings)
    if danger and facts.rank == 0:
        logger.warning('sparse checkpointing: %s', danger)
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
    around = Surroundings(ScalarRecorder(), data, PostStep(facts, counters), operations, Losses())
    session = Session(Job(*joined), facts, counters, around)
    if facts.rank == 0:
        joined.rank.events.emit(describe(settings, facts, counters))
    session.begin()
    with session.job:
        yield session
    session.say_what_stays()  # no thread captures any more


def serve_instead(settings: Settings, config: SparseCheckpointConfig, timeout: timedelta) -> int:
    """Serve the windows of this node to a layout that has no place for this process.

    Args:
        settings: all settings of the job.
        config: settings of sparse checkpointing.
        timeout: for the others to come.

    Returns:
        Exit status of the job, once it has ended.
    """
    if settings.get('exit_signal_handler'):  # those that train end at it, and dismiss this process
        signal.signal(listened_for(sys.argv), signal.SIG_IGN)
    run_id = identity.run_name(settings, config)
    return SurplusRank(identity.rank_identity(settings, 0, config), config, run_id, timeout).serve()
