# SPDX-License-Identifier: Apache-2.0
"""Exits of a job without a failure, and the host memory that they keep or free.

Upstream ends a process inside its loop, by `sys.exit`, for `--exit-interval`,
`--exit-duration-in-mins`, `--exit-signal-handler`, and when its rerun machine wants the job to
restart elsewhere. All ranks exit together, after a barrier of upstream.
"""

from typing import NoReturn

import torch
from megatron.core.rerun_state_machine import (
    EXIT_CODE_FAILED_ON_RESULT_VALIDATION,
    EXIT_CODE_RESUME_TO_DISAMBIGUATE,
)

from megatron.moevement.facts import JobFacts
from megatron.moevement.job import protection_lines
from megatron.moevement.job.session import Session
from megatron.moevement.seams import upstream
from moevement_ext import faults
from moevement_ext.config import OFF
from moevement_ext.errors import UserError
from moevement_ext.faults import Phase
from moevement_ext.job.exporting import reads_memory
from moevement_ext.job.job import Job
from moevement_ext.system.leaving import leave

_RERUN = (EXIT_CODE_RESUME_TO_DISAMBIGUATE, EXIT_CODE_FAILED_ON_RESULT_VALIDATION)


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
        print(protection_lines.exit_line(session.job.committed, remove, directory), flush=True)
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
