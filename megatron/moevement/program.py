# SPDX-License-Identifier: Apache-2.0
"""Runs upstream's `pretrain` with the features of the `--sparse-ckpt*` flags.

Upstream ends a process inside its loop, by `sys.exit`, for `--exit-interval`,
`--exit-duration-in-mins`, `--exit-signal-handler`, and when its rerun machine wants the job to
restart elsewhere. All ranks exit together, after a barrier of upstream; host memory is then kept,
or freed if a dense checkpoint replaces it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from megatron.core.rerun_state_machine import (
    EXIT_CODE_FAILED_ON_RESULT_VALIDATION,
    EXIT_CODE_RESUME_TO_DISAMBIGUATE,
)

from megatron.moevement.arguments import config_from_args
from megatron.moevement.facts import Counters, JobFacts, Settings, UpstreamArguments, facts_of
from megatron.moevement.job import reports
from megatron.moevement.job.flags import refuse_unsupported
from megatron.moevement.job.megatron_loop import OperationCount, decode_handover
from megatron.moevement.job.session import Session, protected_job
from megatron.moevement.job.upstream_trainer import UpstreamTrainer
from megatron.moevement.seams import adam, compiled, patches, upstream, wandb_run
from megatron.moevement.seams.data_position import UpstreamData
from megatron.moevement.state.digest import state_digest
from moevement_ext import faults
from moevement_ext.config import OFF, reads_memory
from moevement_ext.errors import UserError
from moevement_ext.faults import Phase
from moevement_ext.job.digest_file import refuse_unwritable, write_digest
from moevement_ext.job.ending import announce
from moevement_ext.job.job import Job
from moevement_ext.recover.own_report import handovers
from moevement_ext.system.leaving import leave

_WARM_UP = 'megatron.training.training:set_jit_fusion_options'
_RERUN = (EXIT_CODE_RESUME_TO_DISAMBIGUATE, EXIT_CODE_FAILED_ON_RESULT_VALIDATION)


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
    adam.repair_loading()
    adam.install_fp8_masters(settings)
    if not args.sparse_ckpt:
        _digest_at_the_end(args)
        train()
        announce(args.rank, 0)
        return
    compiled.make_repeatable(args.deterministic_mode, warns=args.rank == 0)
    refuse_unsupported(settings)
    patches.check()
    config, facts = config_from_args(args), facts_of(args)
    data = UpstreamData(facts.dataloader_type == 'cyclic', args.full_validation)
    operations = OperationCount(upstream.floating_point_operations)
    with protected_job(settings, facts, args, config, data, operations) as session:
        UpstreamTrainer(settings, facts, args, session, data).install()
        _digest_at_the_end(args)  # outermost wrapper: after the last recovery the state is whole
        try:
            _train(train, args, session)
        except SystemExit as planned:
            exit_as_planned(facts, session, planned)
    wandb_run.forget(args)
    leave(0)


def _train(train: Callable[..., object], counters: Counters, session: Session) -> None:
    membership = session.job.membership
    if membership is None or not membership.joining:
        train(store=session.job.store)
        return
    # Survivors wait for it, and it compiles only what it uses.
    patches.wrap(_WARM_UP, lambda original, **_: None)
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


def exit_as_planned(facts: JobFacts, session: Session, ending: SystemExit) -> NoReturn:
    """Exit as upstream wants; free host memory if a dense checkpoint replaces it. Collective.

    Raises:
        SystemExit: `ending` is not an exit that all ranks make together.
        UserError: `ending` has no status: upstream could not load a dense checkpoint.
    """
    code = ending.code
    if code is None:  # launchers would take it for a finished job
        raise UserError(
            'Megatron ended the program instead of loading the dense checkpoint of --load; its own '
            'message above says why. Fix that, or have --load name another checkpoint.'
        ) from ending
    if code not in (0, *_RERUN) or not torch.distributed.is_initialized():
        raise ending
    faults.point(Phase.EXIT)
    saved = _saved(facts, session.job.committed)
    session.job.end_together()
    remove = saved and _is_loaded(facts, session.job, code) and not reads_memory()
    if not remove and code == 0:  # the rerun machine leaves a half-done iteration in the buffers
        session.job.part()
    session.job.finish(int(code), remove)
    if session.job.kept_in is not None and facts.rank == facts.world_size - 1:
        directory = facts.save if remove else session.job.kept_in.parent
        assert directory is not None  # of the dense checkpoint that was saved
        print(reports.exit_line(session.job.committed, remove, directory), flush=True)
    leave(int(code))


def _is_loaded(facts: JobFacts, job: Job, code: str | int) -> bool:
    """True if the next launch, if any, should resume from the dense checkpoint that was saved.

    At exit status 0: not if the job is elastic and unfinished, as the next layout may be unable to
    load it. At the rerun machine's status: only the checkpoint has the machine's findings, and
    windows of the same iteration would take precedence; but if `--load` differs from `--save`, the
    next launch does not load that checkpoint.
    """
    if code == 0:
        return job.rank.config.elastic == OFF or job.committed >= job.trainer.last_iteration
    return code == EXIT_CODE_RESUME_TO_DISAMBIGUATE and facts.load == facts.save


def _saved(facts: JobFacts, iteration: int) -> bool:
    """True on all ranks if any rank sees a dense checkpoint of `iteration`. Collective."""
    saved = torch.tensor([upstream.saved_iteration(facts.save) == iteration], dtype=torch.int32)
    device = 'cpu' if facts.distributed_backend == 'gloo' else 'cuda'
    saved = saved.to(device)
    torch.distributed.all_reduce(saved, op=torch.distributed.ReduceOp.MAX)
    return bool(saved.item())
