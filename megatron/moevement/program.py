# SPDX-License-Identifier: Apache-2.0
"""Runs upstream's `pretrain` with the features of the `--sparse-ckpt*` flags."""

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.moevement.arguments import config_from_args
from megatron.moevement.facts import Counters, Settings, UpstreamArguments, facts_of
from megatron.moevement.job import planned_exits
from megatron.moevement.job.megatron_loop import decode_handover
from megatron.moevement.job.session import Session, protected_job, serve_instead
from megatron.moevement.job.unsupported import refuse_unsupported
from megatron.moevement.job.upstream_trainer import UpstreamTrainer
from megatron.moevement.seams import compiled, fp8_masters, patches, torch_adam, upstream
from megatron.moevement.seams.data_position import UpstreamData
from megatron.moevement.state.digest import state_digest
from megatron.moevement.state.operation_count import OperationCount
from moevement_ext.job.digest_file import refuse_unwritable, write_digest
from moevement_ext.job.ending import announce
from moevement_ext.recover.own_report import handovers
from moevement_ext.recover.reshard import surplus
from moevement_ext.system.leaving import leave


def run_with_sparse_checkpointing(train: Callable[..., object], args: UpstreamArguments) -> None:
    """Call `train`; with `--sparse-ckpt`, protect it and end the process afterwards.

    `train` is upstream's `pretrain`, ready to be called; it takes `store`.

    Raises:
        ConfigurationError: a flag breaks a rule; the message names the flag.
        UserError: upstream is not a version that this package was checked against.
    """
    if args.sparse_ckpt_digest is not None and args.rank == 0:  # rank 0 writes the file
        refuse_unwritable(args.sparse_ckpt_digest)
    settings: Settings = vars(args)
    torch_adam.patch()
    fp8_masters.install(settings)
    if not args.sparse_ckpt:
        _digest_at_the_end(args)
        train()
        announce(args.rank, 0)
        return
    compiled.make_repeatable(args.deterministic_mode, warns=args.rank == 0)
    refuse_unsupported(settings)
    patches.check()
    config, facts = config_from_args(args), facts_of(args)
    if surplus.is_surplus():
        leave(serve_instead(settings, config, facts.timeout))
    data = UpstreamData(facts.dataloader_type == 'cyclic', args.full_validation)
    operations = OperationCount(upstream.floating_point_operations)
    with protected_job(settings, facts, args, config, data, operations) as session:
        UpstreamTrainer(settings, facts, args, session, data).install()
        _digest_at_the_end(args)  # outermost wrapper: after the last recovery the state is whole
        try:
            _train(train, args, session)
        except SystemExit as planned:
            planned_exits.exit_as_planned(facts, session, planned)
    leave(0)


def _train(train: Callable[..., object], counters: Counters, session: Session) -> None:
    membership = session.job.membership
    if membership is None or not membership.joining:
        train(store=session.job.store)
        return
    # A replacement receives from the survivors the values that set-up obtains by collectives.
    handover = decode_handover(handovers(membership.reports)[0].trainer)
    counters.do_train, counters.do_valid, counters.do_test = handover.runs
    train()


def _digest_at_the_end(args: UpstreamArguments) -> None:
    if args.sparse_ckpt_digest is not None:
        digesting = partial(_digesting, args.sparse_ckpt_digest, args)
        patches.wrap('megatron.training.training:train', digesting, by_name=True)


def _digesting(
    path: str,
    counters: Counters,
    original: Callable[..., tuple[int, float]],
    **call: Any,
) -> tuple[int, float]:
    result = original(**call)
    built = call['model'], call['optimizer'], call['opt_param_scheduler']
    write_digest(path, result[0], state_digest(*built, counters))
    return result
