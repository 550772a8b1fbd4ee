# SPDX-License-Identifier: Apache-2.0
"""Joins this process to the job, before `torch.distributed` is initialised."""

import dataclasses
import os
import platform
import secrets
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy
import torch
from msgspec.structs import replace
from torch.distributed import PrefixStore, Store, init_process_group

from moevement_ext import faults
from moevement_ext.config import (
    OFF,
    WHOLE_JOB,
    ConfigurationError,
    SparseCheckpointConfig,
    node_name,
)
from moevement_ext.errors import UserError
from moevement_ext.events import EventLog
from moevement_ext.logger import logger_of
from moevement_ext.membership import mailbox
from moevement_ext.membership.exchange import Exchange
from moevement_ext.membership.membership import Membership
from moevement_ext.membership.rank import Rank
from moevement_ext.membership.rendezvous import Rendezvous, launcher_store
from moevement_ext.membership.report import Report, decode_all, encode
from moevement_ext.memory.file_system import warn_unless_in_memory
from moevement_ext.memory.limits import require_files, shortage_of_agent
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.shelf import base_of
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.memory.window.settings import RunSettings, bounded, digest_of
from moevement_ext.plan.strategy.choice import only_source
from moevement_ext.recover import launched_alike
from moevement_ext.recover.inventory import launch_of, replacement_report
from moevement_ext.regroup.process_groups import FAKE, stand_in_for
from moevement_ext.replicate.secret import VARIABLE, closed_between_nodes, marks_here
from moevement_ext.store import use_outside_store
from moevement_ext.system import death_notice
from moevement_ext.system.leaving import last_acts, leave_in_any_case
from moevement_ext.system.orphans import end_orphans, find_orphans
from moevement_ext.system.process_setup import ask_again_soon, isolate_children
from moevement_ext.system.watchdog import under_torchrun, watch_set_up

logger = logger_of(__name__)


# Arguments of `Job`: the rank, its membership, the store of this start of the job.
_Joined = tuple[Rank, Membership | None, Store | None]


def join(
    identity: RankIdentity,
    world_size: int,
    run_id: str,
    backend: str,
    config: SparseCheckpointConfig,
    timeout: timedelta,
    not_localized: str | None = None,
) -> _Joined:
    """Rendezvous with the other ranks; returns the arguments of `Job`. Called once per process.

    `run_id` names the run's directory in host memory, `backend` that of `torch.distributed`.
    `timeout` limits the arrival of all ranks. `not_localized` is the reason why any failure
    restarts the whole job, or None.

    From now on `leave` ends this process.

    Raises:
        UserError: this process has other settings than the job that it joins, has joined one
            before, or may open too few files.
        ConfigurationError: the store of `--sparse-ckpt-store` does not answer, or is another
            job's; or nodes without a secret cannot give the protection that the flags demand.
    """
    leave_in_any_case()
    if last_acts:
        raise UserError('this process has joined a job before: start a process for each job.')
    require_files(world_size if backend == 'gloo' else 0)  # NCCL connects only to some peers
    protection = {**config.of_all_ranks(), VARIABLE: b''.join(marks_here()).hex() or 'not set'}
    settings = replace(identity.settings, protection=protection)
    identity = dataclasses.replace(identity, settings=bounded(settings))
    closed = closed_between_nodes()
    if closed is not None:
        if config.strict or config.elastic != OFF:
            raise ConfigurationError(closed)
        if identity.rank == 0:
            logger.warning('%s', closed)
        config = dataclasses.replace(config, replicas=0, recovery=WHOLE_JOB)
    membership, store = _meet(identity, world_size, run_id, config, timeout, not_localized)
    joining = membership is not None and membership.joining
    if not joining:  # builds may block the heartbeats
        watch_set_up(max(timeout.total_seconds(), config.hang_timeout), config.stuck_timeout)
    rank = Rank(
        identity=identity,
        world_size=world_size,
        run_id=run_id,
        backend=backend,
        config=config,
        events=EventLog(config.events, identity.rank, required=not joining),
        exchange=Exchange(membership.archive if membership else None, joining),
    )
    faults.arm(rank.number)
    return rank, membership, store


def join_launched(
    config: SparseCheckpointConfig, settings: Mapping[str, object], backend: str, timeout: timedelta
) -> _Joined:
    """Join with the rank that the launcher has set in the environment of this process.

    `settings` has every setting that can change the bits of the result, by name; values are
    compared as text. `backend` and `timeout` as in `join`.
    """
    rank, ranks = int(os.environ.get('RANK', '0')), int(os.environ.get('WORLD_SIZE', '1'))
    flags = {name: str(value) for name, value in settings.items()}
    layout = {'world size': str(ranks)}
    packages = {'python': platform.python_version(), 'torch': str(torch.__version__)}
    versions = {**packages, 'numpy': numpy.__version__}
    run_id = config.run_id or f'run-{digest_of(flags)}'
    about = bounded(RunSettings(flags=flags, layout=layout, versions=versions))
    identity = RankIdentity(digest_of([run_id, flags]), digest_of(layout), rank, about)
    return join(identity, ranks, run_id, backend, config, timeout)


def _meet(
    identity: RankIdentity,
    world_size: int,
    run_id: str,
    config: SparseCheckpointConfig,
    timeout: timedelta,
    not_localized: str | None,
) -> tuple[Membership | None, Store | None]:
    """Rendezvous with the other ranks, if the launcher's store outlives the workers."""
    directory = Path(config.dir)
    of_all_layouts = run_id if config.elastic == OFF else base_of(run_id)
    ask_again_soon()
    isolate_children()
    death_notice.hold()
    orphans = find_orphans(directory / of_all_layouts)
    watch_set_up(config.hang_timeout, config.stuck_timeout)
    warn_unless_in_memory(directory)
    use_outside_store(config, of_all_layouts, timeout)
    _let_agent_serve(identity.rank, world_size, config)
    launcher = launcher_store(timeout)
    if launcher is None:
        not_localized = 'no launcher, such as torchrun, keeps a store'
    elif under_torchrun() and os.environ.get('GROUP_WORLD_SIZE') == '1':
        not_localized = not_localized or 'the one agent of torchrun restarts all workers together'
    if config.recovery != WHOLE_JOB and not_localized is not None and identity.rank == 0:
        logger.warning('recovery restarts the whole job: %s', not_localized)
    if launcher is not None:
        place = Rendezvous(launcher, identity.rank, world_size)
        launched_alike.refuse_stranger(place, identity, config.strict)
    end_orphans(orphans)
    if launcher is None:
        return None, None
    mailbox.write_memory(launcher, directory / run_id)
    if config.recovery != WHOLE_JOB and not_localized is None:
        mailbox.write_joining(launcher, identity.rank)
        mailbox.write_survivors(launcher)
        node = NodeStore(directory, run_id, node_name())
        report = partial(
            replacement_report, node, identity, only_source(config, run_id, identity.rank)
        )
        membership = Membership.join(
            place, timeout, config.hang_timeout, report, config.stuck_timeout
        )
        _take_part(membership, launcher, identity, config)
        return membership, None if membership.joining else membership.store
    own = Report(False, node_name(), mailbox.own_process(), [], launched=launch_of(identity))
    result = place.meet(lambda: encode(own), timeout)
    launched_alike.check_ranks(result.store, decode_all(result.reports), identity)
    launched_alike.leave(launcher, identity)
    return None, result.store


def _let_agent_serve(rank: int, world_size: int, config: SparseCheckpointConfig) -> None:
    """Raise the limit of open files of torchrun's agent, for connections of all ranks' threads.

    The agent of the first node serves the store, or that of another node at the rendezvous
    endpoint.
    """
    if config.store is not None or not under_torchrun() or os.environ.get('LOCAL_RANK') != '0':
        return
    reason = shortage_of_agent(world_size)
    if reason is not None and rank == 0:
        logger.warning('%s', reason)


def _take_part(
    membership: Membership, launcher: Store, identity: RankIdentity, config: SparseCheckpointConfig
) -> None:
    """Start the job with the other ranks, or join it if this process has the same settings."""
    if not membership.joining:
        launched_alike.check_ranks(membership.store, membership.reports, identity)
        launched_alike.leave(launcher, identity)
        return
    reason = launched_alike.why_not(launcher, membership.reports, identity, config.strict)
    if reason is not None:
        raise UserError(f'{reason}. {launched_alike.REMEDY}')


def connect(rank: Rank, store: Store | None, joining: bool, timeout: timedelta) -> None:
    """Call `init_process_group`; see `Job.init_process_group`."""
    if not joining:
        init_process_group(
            rank.backend, store=store, timeout=timeout, rank=rank.number, world_size=rank.world_size
        )
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    stand_in_for(rank.backend)
    init_process_group(FAKE, store=FakeStore(), rank=rank.number, world_size=rank.world_size)


def own_store(membership: Membership | None, rank: Rank) -> Store:
    """Return a separate connection to the launcher's store, with this run attempt's key prefix."""
    if membership is not None:
        return membership.archive
    default = torch.distributed.distributed_c10d._get_default_store()
    attempt = rank.exchange('attempt', secrets.token_hex(8).encode())[0].decode()
    return PrefixStore(f'sparse-ckpt/{attempt}', default.clone())
