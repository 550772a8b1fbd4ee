# SPDX-License-Identifier: Apache-2.0
"""Runs upstream's `pretrain` with what the `--sparse-ckpt*` flags ask for around it."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from megatron.moevement.arguments import config_from_args
from megatron.moevement.job import ending
from megatron.moevement.job.joining import join
from megatron.moevement.job.session import Session
from megatron.moevement.job.trainer import Surroundings, decode_handover
from megatron.moevement.job.upstream_trainer import UpstreamTrainer
from megatron.moevement.seams import upstream
from megatron.moevement.seams.data_position import UpstreamData
from megatron.moevement.seams.post_step import PostStep
from megatron.moevement.state.digest import state_digest, write_digest
from megatron.moevement.state.global_scalars import ScalarRecorder
from megatron.moevement.state.operation_count import OperationCount
from moevement_ext.job.ending import announce, finish
from moevement_ext.membership.membership import Membership
from moevement_ext.process.leaving import leave
from moevement_ext.recover.localized import handovers


def run_with_sparse_checkpointing(train: Callable[..., Any], args: Any) -> None:
    """Call `train`; without `--sparse-ckpt` nothing stands around it, else the process ends then.

    Args:
        train: upstream's `pretrain`, ready to be called; takes `store`.
        args: upstream's parsed arguments.
    """
    if not args.sparse_ckpt:
        _digest_at_the_end(args)
        train()
        announce(args.rank, 0)
        return
    config = config_from_args(args)
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    membership, store = join(args, config, timeout)
    data, post_step = UpstreamData(), PostStep(args)
    operations = OperationCount(partial(upstream.floating_point_operations, args))
    around = Surroundings(ScalarRecorder(), data, post_step, operations)
    session = Session(args, config, membership, around)
    UpstreamTrainer(args, session, data, post_step).install(localized=membership is not None)
    _digest_at_the_end(args)  # outermost: of a state that is whole, after the last recovery
    session.begin()
    try:
        if membership is not None and membership.joining:
            _train_as_newcomer(train, args, membership)
        else:
            train(store=store)
        finish(session.job)
    except SystemExit as planned:
        ending.exit_as_planned(args, session, planned)
    except Exception as error:
        session.job.failed(error)
        raise
    leave(0)


def _train_as_newcomer(train: Callable[..., Any], args: Any, membership: Membership) -> None:
    # What set-up learns from the others elsewhere, a process that joins them is told.
    handover = decode_handover(handovers(membership.reports)[0].trainer)
    args.do_train, args.do_valid, args.do_test = handover.runs
    train()


def _digest_at_the_end(args: Any) -> None:
    if args.sparse_ckpt_digest is not None:
        upstream.wrap('train', _digesting(args))


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
