# SPDX-License-Identifier: Apache-2.0
"""Runs upstream's `pretrain` with what the `--sparse-ckpt*` flags ask for around it."""

import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.moevement import identity, upstream
from megatron.moevement.arguments import config_from_args, not_localized
from megatron.moevement.digest import state_digest, write_digest
from megatron.moevement.local_recovery import handovers
from megatron.moevement.membership import Membership, newcomer_report
from megatron.moevement.session import Session
from moevement_ext.config import LOCALIZED, SparseCheckpointConfig, node_name
from moevement_ext.memory.store import NodeStore
from moevement_ext.rendezvous import Rendezvous, launcher_store

logger = logging.getLogger(__name__)


def run_with_sparse_checkpointing(train: Callable[..., Any], args: Any) -> None:
    """Call `train`; without `--sparse-ckpt` nothing stands around it.

    Args:
        train: upstream's `pretrain`, ready to be called; takes `store`.
        args: upstream's parsed arguments.
    """
    if args.sparse_ckpt_digest is not None:
        upstream.wrap('train', _digesting(args))
    if not args.sparse_ckpt:
        train()
        return
    config = config_from_args(args)
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    launcher = launcher_store(timeout)
    membership = _member(args, config, launcher, timeout)
    session = Session(args, config, membership)
    session.install()
    if membership is not None:
        _train_as_member(train, args, membership)
    else:
        train(store=_fresh_store(launcher, args, timeout))
    torch.distributed.barrier()  # nobody gives up what another may still need to recover
    session.close()


def _member(
    args: Any, config: SparseCheckpointConfig, launcher: torch.distributed.Store | None,
    timeout: timedelta,
) -> Membership | None:  # fmt: skip
    """Meet the other ranks; None where a failure can only restart the whole job."""
    reason = not_localized(args)
    if config.recovery != LOCALIZED or launcher is None or reason is not None:
        if config.recovery == LOCALIZED and reason is not None and args.rank == 0:
            logger.warning('sparse checkpointing: recovery restarts the whole job: %s', reason)
        return None
    run_id = identity.run_name(args, config)
    store = NodeStore(Path(config.dir), run_id, node_name())
    report = partial(
        newcomer_report, store, identity.run_identity(args, run_id),
        identity.topology_identity(args), args.rank,
    )  # fmt: skip
    return Membership(launcher, args.rank, args.world_size, timeout, config.hang_timeout, report)


def _train_as_member(train: Callable[..., Any], args: Any, membership: Membership) -> None:
    if not membership.joining:
        train(store=membership.store)
        return
    # What set-up learns from the others elsewhere, a process that joins them is told.
    args.do_train, args.do_valid, args.do_test = handovers(membership.reports)[0].runs
    train()


def _fresh_store(
    launcher: torch.distributed.Store | None, args: Any, timeout: timedelta
) -> torch.distributed.Store | None:
    """A store without the keys of an earlier life of the job, where the launcher's outlives it."""
    if launcher is None:
        return None
    return Rendezvous(launcher, args.rank, args.world_size).meet(lambda: b'', timeout).store


def _digesting(args: Any) -> Callable[..., Any]:
    def train(
        original: Any, forward: Any, model: Any, optimizer: Any, scheduler: Any, *rest: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        result = original(forward, model, optimizer, scheduler, *rest, **kwargs)
        entries = state_digest(model, optimizer, scheduler, args)
        write_digest(args.sparse_ckpt_digest, result[0], entries)
        return result

    return train
