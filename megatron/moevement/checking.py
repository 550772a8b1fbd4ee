# SPDX-License-Identifier: Apache-2.0
"""Checks the flags of a job without starting it, with the messages of a real start.

Upstream parses and validates the flags as on the first rank, but sets nothing up. The functions of
a real start then apply their rules. Two answers need a running job: the host memory for the model
(`moevement plan` computes it), and whether the launcher can replace a worker.
"""

import argparse
import contextlib
import io
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megatron.training import arguments as upstream
from megatron.training.argument_utils import (
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)

from megatron.moevement.arguments import add_arguments, config_from_args, validate
from megatron.moevement.facts import Settings, UpstreamArguments
from megatron.moevement.job import identity, layout_choice, placing
from megatron.moevement.job.flags import hazard, refusals, whole_job_reasons
from megatron.moevement.job.named_files import empty_part, missing_data, refuse_missing
from megatron.moevement.seams import adam, cpu_device, dense_tier, expert_slots, patches, warming
from moevement_ext import events
from moevement_ext.config import GLOBAL, WHOLE_JOB, SparseCheckpointConfig
from moevement_ext.config_file import sources
from moevement_ext.errors import HostMemoryError, UserError
from moevement_ext.events import probe
from moevement_ext.job.digest_file import refuse_unwritable
from moevement_ext.memory import private_file
from moevement_ext.memory.disk import require_writable
from moevement_ext.memory.node_store import require_directory_name
from moevement_ext.replicate.placement import failure_domains

_CONNECTIONS = 'CUDA_DEVICE_MAX_CONNECTIONS'


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Result of applying a start's rules to a set of flags."""

    ranks: int
    """World size for which the flags are judged."""
    refused: list[str]
    """Reasons for a refusal, one line each; empty if the job starts."""
    whole_job: list[str]
    """Reasons why a failure restarts all workers."""
    notes: list[str]
    """Hazards that do not prevent the start."""
    together: bool = False
    """All stages roll back together, in the living processes."""
    settings: tuple[str, ...] = ()
    """Settings other than the defaults, and where each comes from."""

    @property
    def protected(self) -> bool:
        """True if the job starts, and recovers from failures."""
        return not self.refused

    @property
    def localized(self) -> bool:
        """True if only stages that lost a worker roll back, where the launcher replaces workers."""
        return self.protected and not self.whole_job and not self.together


def judge(flags: Sequence[str], ranks: int | None = None) -> Judgement:
    """Judge the flags of a job as if `--sparse-ckpt` was among them.

    `ranks` None: the smallest world size that the parallel sizes allow.

    Raises:
        SystemExit: a flag is wrong: one line on stderr, status 2.
    """
    with warnings.catch_warnings(action='ignore'):
        given = _given(flags)
        ranks = ranks or fewest_ranks(given)
        assumed = cpu_device.needed() and given['distributed_backend'] == 'nccl'
        with cpu_device.capable() if assumed else contextlib.nullcontext():
            try:
                args = validated(flags, ranks)
            except (Exception, SystemExit) as error:
                refused = [*refusals(given), in_words(error)]
                return Judgement(ranks=ranks, refused=refused, whole_job=[], notes=[])
            judgement = _judged(args)
        values, named = vars(args), sources(flags).items()
        shown = tuple(f'{name} = {values[f"sparse_ckpt_{name}"]!r}: {of}' for name, of in named)
        judgement = replace(judgement, settings=shown)
        if assumed and args.moe_grouped_gemm:
            judgement.notes.append('no GPU is visible here; --moe-grouped-gemm is judged with one')
        if args.sparse_ckpt_elastic_layouts:
            layout = placing.layout_of(vars(args)) or f'{args.world_size} ranks'
            judgement.notes.append(f'layout: {layout}')
        return judgement


def _given(flags: Sequence[str]) -> Settings:
    known = parser()
    try:
        return vars(known.parse_args(flags))
    except Exception as error:  # argparse passes on errors of upstream's flag types
        known.error(in_words(error))


def fewest_ranks(settings: Settings) -> int:
    """Smallest world size that the parallel sizes in `settings` allow."""

    def size(name: str, default: int = 1) -> int:
        value = settings.get(name)
        return value if isinstance(value, int) else default

    tensor, pipeline = size('tensor_model_parallel_size'), size('pipeline_model_parallel_size')
    shards = size('tensor_parallel_num_weight_shards', tensor)
    dense, context = shards * pipeline, size('context_parallel_size')
    experts_tensor = size('expert_tensor_parallel_size', tensor)
    experts = experts_tensor * size('expert_model_parallel_size') * pipeline
    instances = size('num_distributed_optimizer_instances')
    return math.lcm(dense * context, dense * instances, experts * instances)


def parser() -> argparse.ArgumentParser:
    """Parser of all flags of `pretrain_gpt.py`."""
    warming.install()  # upstream builds its parser a second time
    plain = argparse.ArgumentParser('pretrain_gpt.py', allow_abbrev=False)
    return add_arguments(upstream.add_megatron_arguments(plain))


def validated(flags: Sequence[str], ranks: int) -> UpstreamArguments:
    """Upstream's `parse_and_validate_args`, without the objects that it builds for training.

    Raises upstream's errors, and `ConfigurationError` if no layout of the flags fits. Only a start
    can tell which layout fits into host memory.
    """
    more_flags = layout_choice.fitted(flags, ranks, lambda _flags, _ranks: None)
    with as_first_rank([*flags, *more_flags], ranks), contextlib.redirect_stdout(io.StringIO()):
        args: UpstreamArguments = upstream.parse_args(add_arguments)
        if args.use_checkpoint_args:
            dense_tier.take_flags_of_checkpoint(args)
        validate(upstream.validate_args, args)
    return args


@contextlib.contextmanager
def as_first_rank(flags: Sequence[str], ranks: int) -> Iterator[None]:
    """Set `sys.argv` and the launcher's environment variables, which upstream reads."""
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
    refused = [*_refusal(partial(adam.choose_fp8_masters, args)), *refusals(settings)]
    if not refused:  # else upstream may repeat the refusal in many lines
        refused += _refusal_by_upstream(partial(_configure, args))
    refused += _refusal(patches.check)
    refused += _refusal(partial(_refuse_grid, args))
    refused += _refusal(partial(refuse_missing, settings, args.rank))
    if not settings.get('sft'):  # SFT data has another format
        refused += [str(missing) for missing in [missing_data(settings, args.rank)] if missing]
    refused += [str(empty) for empty in [empty_part(settings)] if empty]
    whole_job, together = whole_job_reasons(settings), False
    try:
        config = config_from_args(args)
    except UserError as error:
        refused.append(str(error))
    else:
        run_id = identity.run_name(settings, config)
        refused += [text for check in _of_config(config, run_id) for text in _refusal(check)]
        if config.expert_slots:
            refused += _refusal(partial(expert_slots.refuse, settings, config, own_loop=False))
        if config.lossy:
            refused += _refusal(partial(_refuse_experts, config, args.num_experts))
        together = config.recovery == GLOBAL
        if config.recovery == WHOLE_JOB:
            whole_job.insert(0, f'--sparse-ckpt-recovery {config.recovery}')
    if args.sparse_ckpt_digest is not None:
        refused += _refusal(partial(refuse_unwritable, args.sparse_ckpt_digest))
    notes = [hazard(settings), _missing_variable(args)]
    if not (whole_job or together):
        notes.append(_tied(args))
    noted = [one for one in notes if one]
    return Judgement(
        ranks=args.world_size,
        refused=refused,
        whole_job=whole_job,
        notes=noted,
        together=together,
    )


def _tied(args: UpstreamArguments) -> str | None:
    """Note about embeddings that the first and the last pipeline stage share, if any."""
    if args.pipeline_model_parallel_size == 1 or args.untie_embeddings_and_output_weights:
        return None
    return (
        'without --untie-embeddings-and-output-weights the first and the last pipeline stage share '
        'weights, and a failure of one of them rolls back both'
    )


def _missing_variable(args: UpstreamArguments) -> str | None:
    """Note about an unset variable that upstream needs and a launcher may set, if any."""
    needed = args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1
    if not needed or _CONNECTIONS in os.environ:
        return None
    return f'{_CONNECTIONS} is not set here; Megatron needs 1 for this layout before Blackwell'


def _refuse_experts(config: SparseCheckpointConfig, of: int | None) -> None:
    from moevement_ext.protect.expert_ledger import refuse_too_many  # for lossy strategies only

    refuse_too_many(config.experts, of)


def _refuse_grid(args: UpstreamArguments) -> None:
    """Apply the rules of upstream's process groups, which a start checks last."""
    sizes = layout_choice.LayoutSizes(
        tensor=args.tensor_model_parallel_size * args.gtp_weight_remat_size,
        expert_tensor=args.expert_tensor_parallel_size * args.expert_gtp_weight_remat_size,
        pp=args.pipeline_model_parallel_size,
        ep=args.expert_model_parallel_size,
        cp=args.context_parallel_size,
        instances=args.num_distributed_optimizer_instances,
    )
    misfit = sizes.misfit(args.world_size)
    if misfit is not None:
        raise UserError(
            f'Megatron ends, as {misfit}: change the number of ranks, or the parallel sizes, '
            f'{sizes}'
        )


def _of_config(config: SparseCheckpointConfig, run_id: str) -> Iterator[Callable[[], object]]:
    """Checks of the files and names that a start would use."""
    yield partial(require_directory_name, '--sparse-ckpt-run-id', run_id)
    yield partial(_refuse_memory, Path(config.dir))
    if config.disk is not None:
        yield partial(require_writable, Path(config.disk))
    if config.events is not None:
        yield partial(events.require_writable, config.events)
    yield partial(failure_domains, [], config.topology)


def _refuse_memory(root: Path) -> None:
    """Refuse a `--sparse-ckpt-dir` with which a start would stop, or train unprotected."""
    try:
        if root.exists():
            private_file.check_root(root)
        probe(root)
    except (OSError, HostMemoryError) as error:
        raise UserError(
            f'--sparse-ckpt-dir {root}: training would be unprotected: {error}'
        ) from error


def _refusal(check: Callable[[], object]) -> list[str]:
    """Message of the refusal that `check` raises; empty if none."""
    try:
        check()
    except UserError as error:
        return [str(error)]
    return []


def _configure(args: UpstreamArguments) -> None:
    """Build upstream's configurations, which check further rules.

    The vocabulary size is arbitrary: the real size needs the tokenizer, which is not opened.
    """
    whole = argparse.Namespace(**vars(args))
    smallest = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    whole.padded_vocab_size = args.padded_vocab_size or smallest
    pretrain_cfg_container_from_args(whole, gpt_config_from_args(whole))


def _refusal_by_upstream(check: Callable[[], object]) -> list[str]:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            check()
    except Exception as error:
        return [in_words(error)]
    return []


def in_words(error: BaseException) -> str:
    """Upstream's error in one line; if it has no message, the failing line of upstream's source.

    Errors of this package are returned unchanged.
    """
    if isinstance(error, UserError):
        return str(error)
    source = traceback.extract_tb(error.__traceback__)[-1].line
    words = ' '.join(str(error).split()) or source or ''
    if missing := re.fullmatch(r'assert args\.(\w+) is not None', words):
        return f'--{missing[1].replace("_", "-")} is missing: Megatron needs it here'
    return f'Megatron ends with {type(error).__name__}: {words}'
