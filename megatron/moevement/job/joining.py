# SPDX-License-Identifier: Apache-2.0
"""How a process takes its place in the job, before `torch.distributed` is initialised."""

import logging
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import Store

from megatron.moevement.job import identity
from megatron.moevement.job.unsupported import not_localized
from moevement_ext.config import LOCALIZED, SparseCheckpointConfig, node_name
from moevement_ext.local_cluster.statements import tell_memory, tell_survivors
from moevement_ext.membership.membership import Membership
from moevement_ext.membership.rendezvous import Rendezvous, launcher_store
from moevement_ext.memory.file_system import warn_unless_in_memory
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.process.forks import close_connections_in_children
from moevement_ext.process.orphans import end_orphans
from moevement_ext.recover.inventory import newcomer_report

logger = logging.getLogger(__name__)


def join(
    args: Any, config: SparseCheckpointConfig, timeout: timedelta
) -> tuple[Membership | None, Store | None]:
    """Meet the other ranks, if there is a launcher whose store outlives the workers.

    Returns:
        The membership, None where a failure can only restart the whole job; and the store to
        initialise `torch.distributed` with, without keys of an earlier life of the job; None for
        torch's own.
    """
    close_connections_in_children()
    end_orphans()
    warn_unless_in_memory(Path(config.dir))
    launcher = launcher_store(timeout)
    if launcher is None:
        return None, None
    tell_memory(launcher, Path(config.dir) / identity.run_name(args, config))
    reason = not_localized(args)
    if config.recovery == LOCALIZED and reason is None:
        tell_survivors(launcher)
        membership = _member(args, config, launcher, timeout)
        return membership, membership.store
    if config.recovery == LOCALIZED and args.rank == 0:
        logger.warning('sparse checkpointing: recovery restarts the whole job: %s', reason)
    meeting = Rendezvous(launcher, args.rank, args.world_size).meet(lambda: b'', timeout)
    return None, meeting.store


def _member(
    args: Any, config: SparseCheckpointConfig, launcher: Store, timeout: timedelta
) -> Membership:
    run_id = identity.run_name(args, config)
    store = NodeStore(Path(config.dir), run_id, node_name())
    report = partial(newcomer_report, store, identity.rank_identity(args, config))
    return Membership(
        launcher, args.rank, args.world_size, timeout, config.hang_timeout, report,
        stuck_timeout_s=config.stuck_timeout,
    )  # fmt: skip
