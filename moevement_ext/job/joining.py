# SPDX-License-Identifier: Apache-2.0
"""Joins this process to the job, before `torch.distributed` is initialised."""

import logging
from datetime import timedelta
from functools import partial
from pathlib import Path

from torch.distributed import Store

from moevement_ext.config import OFF, WHOLE_JOB, SparseCheckpointConfig, node_name
from moevement_ext.errors import UserError
from moevement_ext.launch.statements import tell_joining, tell_memory, tell_survivors
from moevement_ext.membership.membership import Membership
from moevement_ext.membership.node_copy import NodeCopy
from moevement_ext.membership.rendezvous import Rendezvous, launcher_store
from moevement_ext.memory.file_system import warn_unless_in_memory
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.shelf import base_of
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.process.forks import isolate_children
from moevement_ext.process.name_lookups import ask_again_soon
from moevement_ext.process.orphans import end_orphans
from moevement_ext.process.watchdog import watch_set_up
from moevement_ext.recover import launched_alike
from moevement_ext.recover.inventory import replacement_report
from moevement_ext.store.outside import meet_there

logger = logging.getLogger(__name__)


def join(
    identity: RankIdentity,
    world_size: int,
    run_id: str,
    config: SparseCheckpointConfig,
    timeout: timedelta,
    not_localized: str | None = None,
) -> tuple[Membership | None, Store | None]:
    """Meet the other ranks, if the launcher's store outlives the workers.

    Args:
        identity: identity of this rank.
        world_size: number of ranks.
        run_id: name of the run's directory in host memory.
        config: settings.
        timeout: for all ranks to arrive.
        not_localized: reason why any failure restarts the whole job, or None.

    Returns:
        The membership, None if any failure restarts the whole job; and the store for
        `torch.distributed`, without keys of an earlier start of the job, None for torch's own.

    Raises:
        UserError: this process has other settings than the job that it joins.
        ConfigurationError: the store of `--sparse-ckpt-store` does not answer, or is another
            job's.
    """
    directory = Path(config.dir)
    ask_again_soon()
    isolate_children()
    end_orphans(directory / run_id)
    watch_set_up(max(timeout.total_seconds(), config.hang_timeout))
    warn_unless_in_memory(directory)
    meet_there(config, run_id if config.elastic == OFF else base_of(run_id), timeout)
    launcher = launcher_store(timeout)
    if launcher is None:
        return None, None
    tell_memory(launcher, directory / run_id)
    if config.recovery != WHOLE_JOB and not_localized is None:
        tell_joining(launcher, identity.rank)
        tell_survivors(launcher)
        node = NodeStore(directory, run_id, node_name())
        report = partial(replacement_report, node, identity)
        copy = NodeCopy(directory, node.shared)
        membership = Membership(
            Rendezvous(launcher, identity.rank, world_size, copy),
            timeout,
            config.hang_timeout,
            report,
            stuck_timeout_s=config.stuck_timeout,
        )
        _take_part(membership, identity, config)
        return membership, membership.store
    if config.recovery != WHOLE_JOB and identity.rank == 0:
        logger.warning('sparse checkpointing: recovery restarts the whole job: %s', not_localized)
    meeting = Rendezvous(launcher, identity.rank, world_size).meet(lambda: b'', timeout)
    return None, meeting.store


def _take_part(
    membership: Membership, identity: RankIdentity, config: SparseCheckpointConfig
) -> None:
    """Begin the job, or join it if this process has the same settings."""
    if not membership.joining:
        if identity.rank == 0:
            launched_alike.leave(membership.archive, identity)
        return
    reason = launched_alike.why_not(membership.archive, membership.reports, identity, config.strict)
    if reason is not None:
        membership.refuse(reason)
        raise UserError(
            f'{reason}. Launch it with the same flags, files, versions and environment.'
        )
