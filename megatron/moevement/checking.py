# SPDX-License-Identifier: Apache-2.0
"""What becomes of a job with some flags, without starting it: what its start would say.

Upstream parses and validates the flags as on the first rank, but sets nothing up. Then come the
rules that a start applies, by the functions that it calls. What only a job finds out is left: how
much host memory its model takes (`tools.plan` computes it), and whether its launcher can replace a
worker.

Checked against megatron-core 0.19.2.
"""

import argparse
import contextlib
import io
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.training import arguments as upstream
from megatron.training.argument_utils import (
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)

from megatron.moevement.arguments import add_arguments, config_from_args
from megatron.moevement.facts import Settings, UpstreamArguments
from megatron.moevement.job import identity
from megatron.moevement.job.local_files import refuse_missing
from megatron.moevement.job.unsupported import hazard, refusals, whole_job_reasons
from megatron.moevement.seams import dense_tier, fp8_masters, patches
from megatron.moevement.state.digest import refuse_unwritable
from moevement_ext.config import LOCALIZED, SparseCheckpointConfig
from moevement_ext.errors import UserError
from moevement_ext.memory.disk import require_mounted
from moevement_ext.memory.node_store import require_directory_name
from moevement_ext.replicate.domains import failure_domains

_CONNECTIONS = 'CUDA_DEVICE_MAX_CONNECTIONS'


@dataclass(frozen=True)
class Judgement:
    """What the start of a job would say of its flags."""

    ranks: int
    """World size that it is judged for."""
    refused: list[str]
    """Why it is not started, line by line; empty if it is."""
    whole_job: list[str]
    """Why a failure restarts all workers."""
    notes: list[str]
    """What may go wrong all the same."""

    @property
    def protected(self) -> bool:
        """The job is started, and recovers from failures."""
        return not self.refused

    @property
    def localized(self) -> bool:
        """A failure is recovered on the stages that lost a worker alone, where a launcher can."""
        return self.protected and not self.whole_job


def judge(flags: Sequence[str], ranks: int | None = None) -> Judgement:
    """Judge a job as if it had `--sparse-ckpt`.

    Args:
        flags: all flags of `pretrain_gpt.py`.
        ranks: world size; None: the fewest that the parallel sizes need.

    Raises:
        SystemExit: a flag is wrong; it is said in one line on stderr, the status is 2.
    """
    with warnings.catch_warnings(action='ignore'):
        given = vars(_parser().parse_args(flags))
        ranks = ranks or fewest_ranks(given)
        try:
            args = _validated(flags, ranks)
        except (Exception, SystemExit) as error:
            return Judgement(ranks, [*refusals(given), _told(error)], [], [])
        return _judged(args)


def fewest_ranks(settings: Settings) -> int:
    """World size that the parallel sizes among some settings need."""

    def size(name: str, default: int = 1) -> int:
        value = settings.get(name)
        return value if isinstance(value, int) else default

    tensor, pipeline = size('tensor_model_parallel_size'), size('pipeline_model_parallel_size')
    shards = size('tensor_parallel_num_weight_shards', tensor)
    dense = shards * pipeline * size('context_parallel_size')
    experts_tensor = size('expert_tensor_parallel_size', tensor)
    experts = experts_tensor * size('expert_model_parallel_size') * pipeline
    return math.lcm(dense * size('num_distributed_optimizer_instances'), experts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser('pretrain_gpt.py', allow_abbrev=False)
    return add_arguments(upstream.add_megatron_arguments(parser))


def _validated(flags: Sequence[str], ranks: int) -> UpstreamArguments:
    """What upstream's `parse_and_validate_args` returns, which also builds what training needs."""
    with _as_first_rank(flags, ranks), contextlib.redirect_stdout(io.StringIO()):
        args: UpstreamArguments = upstream.parse_args(add_arguments)
        if args.use_checkpoint_args:
            dense_tier.take_flags_of_checkpoint(args)
        upstream.validate_args(args)
    return args


@contextlib.contextmanager
def _as_first_rank(flags: Sequence[str], ranks: int) -> Iterator[None]:
    """Upstream reads its command line, and what a launcher says, from the process."""
    argv, environment = sys.argv, dict(os.environ)
    sys.argv = ['pretrain_gpt.py', *flags]
    os.environ |= {'RANK': '0', 'WORLD_SIZE': str(ranks)}
    os.environ.setdefault(_CONNECTIONS, '1')
    try:
        yield
    finally:
        sys.argv = argv
        os.environ.clear()
        os.environ |= environment


def _judged(args: UpstreamArguments) -> Judgement:
    settings: Settings = vars(args)
    refused = [*_said(partial(fp8_masters.take_place, args)), *refusals(settings)]
    if not refused:  # else upstream may say the same once more, at length
        refused += _said_by_upstream(partial(_configure, args))
    refused += _said(patches.check)
    refused += _said(partial(refuse_missing, settings, args.rank))
    whole_job = whole_job_reasons(settings)
    try:
        config = config_from_args(args)
    except UserError as error:
        refused.append(str(error))
    else:
        run_id = identity.run_name(settings, config)
        refused += [said for check in _of_config(config, run_id) for said in _said(check)]
        if config.recovery != LOCALIZED:
            whole_job.insert(0, f'--sparse-ckpt-recovery {config.recovery}')
    if args.sparse_ckpt_digest is not None:
        refused += _said(partial(refuse_unwritable, args.sparse_ckpt_digest))
    notes = [hazard(settings), _missing_variable(args)]
    return Judgement(args.world_size, refused, whole_job, [one for one in notes if one])


def _missing_variable(args: UpstreamArguments) -> str | None:
    """What the environment lacks that upstream needs; a launcher may set it."""
    needed = args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1
    if not needed or _CONNECTIONS in os.environ:
        return None
    return f'{_CONNECTIONS} is not set here; for this layout Megatron asks for 1 before Blackwell'


def _of_config(config: SparseCheckpointConfig, run_id: str) -> Iterator[Callable[[], object]]:
    """What set-up finds out of files and names."""
    yield partial(require_directory_name, '--sparse-ckpt-run-id', run_id)
    if config.disk is not None:
        yield partial(require_mounted, Path(config.disk))
    yield partial(failure_domains, [], config.topology)


def _said(check: Callable[[], object]) -> list[str]:
    """Why a check refuses."""
    try:
        check()
    except UserError as error:
        return [str(error)]
    return []


def _configure(args: UpstreamArguments) -> None:
    """Make upstream's configurations, which have rules of their own; with a vocabulary of any size.

    Its size comes from the tokenizer, which is not opened.
    """
    whole = argparse.Namespace(**vars(args))
    smallest = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    whole.padded_vocab_size = args.padded_vocab_size or smallest
    pretrain_cfg_container_from_args(whole, gpt_config_from_args(whole))


def _said_by_upstream(check: Callable[[], object]) -> list[str]:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            check()
    except Exception as error:
        return [_told(error)]
    return []


def _told(error: BaseException) -> str:
    """What upstream ends with, in one line, by the line of its source if it says nothing."""
    source = traceback.extract_tb(error.__traceback__)[-1].line
    words = ' '.join(str(error).split()) or source
    return f'Megatron ends with {type(error).__name__}: {words}'
