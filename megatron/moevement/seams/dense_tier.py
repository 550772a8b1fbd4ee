# SPDX-License-Identifier: Apache-2.0
"""Finds the dense checkpoint that `--load` would resume from, without ending the program.

Upstream finds out by loading: a checkpoint that it cannot read ends the job at once, even if there
are windows. So each rank checks the files itself, and skips a checkpoint that a rank cannot read.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
from megatron.training import checkpointing
from megatron.training.checkpointing import (
    get_checkpoint_name,
    get_checkpoint_tracker_filename,
    maybe_msc,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron.moevement.facts import JobFacts, UpstreamArguments
from megatron.moevement.seams import patches, upstream
from moevement_ext.logger import logger_of

logger = logger_of(__name__)

_RELEASE = 'release'
_NAMED = 3


class DenseTier(NamedTuple):
    """One rank's view of the newest dense checkpoint."""

    iteration: int
    """-1: no checkpoint, or its tracker file names none."""
    problem: str = ''
    """Reason why it cannot be read."""


_TIER = msgspec.msgpack.Decoder(DenseTier)


_NONE = DenseTier(-1)


def dense_iteration(facts: JobFacts, exchange: Callable[[str, bytes], list[bytes]]) -> int:
    """Iteration that `--load` would resume from, -1 if not all ranks can read a checkpoint.

    Collective. The log names unreadable files; a job without another source still tries to load.
    """
    if facts.load is None:
        return -1
    own = msgspec.msgpack.encode(_seen(facts, facts.load))
    seen = [_TIER.decode(item) for item in exchange('dense', own)]
    newest = max(tier.iteration for tier in seen)
    problems = {rank: tier.problem for rank, tier in enumerate(seen) if tier.problem}
    if newest >= 0:
        problems |= {
            rank: f'no dense checkpoint in {facts.load}'
            for rank, tier in enumerate(seen)
            if tier == _NONE
        }
    if problems:
        if facts.rank == 0:
            reasons = [f'rank {rank}: {text}' for rank, text in list(problems.items())[:_NAMED]]
            logger.warning(
                'the dense checkpoint of --load is used only if there is no other source, as %d '
                'of %d ranks cannot read it: %s',
                len(problems),
                len(seen),
                '; '.join(reasons),
            )
        return -1
    return 0 if facts.finetune and newest >= 0 else newest


def keep_given_flags() -> None:
    """Ignore `--use-checkpoint-args` if the checkpoint cannot be read. Call before parsing.

    If the flags differ from those of a window, the window is refused by name later; without windows
    upstream ends the job when it loads the checkpoint.
    """
    patches.wrap('megatron.training.checkpointing:load_args_from_checkpoint', _or_as_given)


def take_flags_of_checkpoint(args: UpstreamArguments) -> None:
    """Run upstream's parser step for `--use-checkpoint-args` once; keep flags if it fails."""
    _or_as_given(checkpointing.load_args_from_checkpoint, args)


def _or_as_given(
    original: Callable[..., object], args: UpstreamArguments, *more: object, **named: object
) -> object:
    try:
        return original(args, *more, **named)
    except (Exception, SystemExit) as error:
        logger.warning(
            '--use-checkpoint-args: flags count as given, as the dense checkpoint of --load '
            'cannot be read: %r',
            error,
        )
        return args


def _seen(facts: JobFacts, load: str) -> DenseTier:
    """The checkpoint that upstream would load: the newest of both directories, readable or not."""
    reads_metadata = facts.rank == 0
    found = [_newest_in(load, facts.ckpt_step, reads_metadata)]
    if facts.non_persistent_ckpt_type == 'global':
        within = os.path.join(load, checkpointing._NON_PERSISTENT_CKPT_SUBDIR)
        directory = facts.non_persistent_global_ckpt_dir or within
        found.insert(0, _newest_in(directory, None, reads_metadata))  # comes first if equally new
    # A tracker file that names no checkpoint ends upstream, even if the other directory has one.
    unnamed = (tier for tier in found if tier.problem and tier.iteration < 0)
    return next(unnamed, max(found, key=lambda tier: tier.iteration))


def _newest_in(directory: str, step: int | None, reads_metadata: bool) -> DenseTier:
    """The checkpoint that a directory's tracker file names, or that of iteration `step`."""
    tracker = get_checkpoint_tracker_filename(directory)
    iteration, release = -1, False
    try:
        text = upstream.tracked(directory)
        if text is not None:
            release = text == _RELEASE
            if not release and not text.isdecimal():
                return DenseTier(-1, f'{tracker} contains {text!r}, which is not an iteration')
            iteration = 0 if release else int(text)
        iteration = step or iteration  # upstream needs no tracker file for it
        if iteration < 0:
            return _NONE
        named = get_checkpoint_name(directory, iteration, release, return_base_dir=True)
        if not maybe_msc.os.path.isdir(named):
            names = f'--ckpt-step {step}' if step else tracker
            return DenseTier(iteration, f'{named}, which {names} names, does not exist')
        missing = _missing_in(Path(named)) if reads_metadata else None
    except OSError as error:
        return DenseTier(iteration, f'{tracker}: {error}')
    return DenseTier(iteration, missing or '')


def _missing_in(folder: Path) -> str | None:
    """A missing or truncated file of a checkpoint in torch's distributed format, if any."""
    if not (folder / 'metadata.json').is_file():
        return None  # another format, or an object store
    try:
        parts = FileSystemReader(folder).read_metadata().storage_data or {}
    except Exception as error:  # damaged bytes may raise any error
        return f'{folder} cannot be read: {error!r}'
    sizes: dict[str, int] = {}
    for part in parts.values():
        end = part.offset + part.length
        sizes[part.relative_path] = max(sizes.get(part.relative_path, 0), end)
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size < size:
            return f'{path} is truncated or missing'
    return None
