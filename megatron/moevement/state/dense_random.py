# SPDX-License-Identifier: Apache-2.0
"""Generator states of every rank, stored with upstream's dense checkpoint.

Upstream saves one state of each generator for all data-parallel ranks of a stage, the state of the
first rank. With `--moe-router-force-load-balancing` the other ranks draw from generators of other
experts, whose states are lost. So each rank writes its own states to a subfolder of the checkpoint.
Plain Megatron neither needs nor reads it.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import torch
import xxhash
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)

from megatron.moevement.facts import JobFacts, Settings
from megatron.moevement.seams import patches
from megatron.moevement.state.iteration_state import RngState, capture_rng, restore_rng
from moevement_ext.logger import logger_of

logger = logger_of(__name__)

_FOLDER = 'moevement'
_VERSION = 1
_CHECKSUM_BYTES = 8
_HEAD_BYTES = 2**20
# Files that identify a checkpoint; the first existing one is digested.
_TELLING = '.metadata', 'mp_rank_*/model_optim_rng.pt'
_SCHEDULING = 'megatron.training.checkpointing:schedule_async_save'


class _Kept(msgspec.Struct, kw_only=True):
    """The stored states of one rank."""

    version: int
    topology: str
    """Digest of the parallel layout."""
    checkpoint: str
    """Digest of a part of the checkpoint that the states belong to."""
    rng: RngState


_KEPT = msgspec.msgpack.Decoder(_Kept)


class DenseRandom:
    """Wraps upstream's save and load of dense checkpoints. Training thread only."""

    def __init__(self, facts: JobFacts, settings: Settings, topology: str) -> None:
        self._facts = facts
        self._saves = not settings['no_save_rng']
        self._loads = not (settings['finetune'] or settings['no_load_rng'])
        self._experts_draw = bool(settings['moe_router_force_load_balancing'])
        self._topology = topology

    def save(
        self,
        original: Callable[..., object],
        iteration: int,
        *args: object,
        non_persistent_ckpt: bool = False,
        **kwargs: object,
    ) -> object:
        """Run upstream's save, then write this rank's states from before the save.

        An asynchronous save identifies the checkpoint in its finalization: they are written again.
        """
        rng = capture_rng()
        kwargs['non_persistent_ckpt'] = non_persistent_ckpt
        save = self._facts.save
        local = non_persistent_ckpt and self._facts.non_persistent_ckpt_type == 'local'
        if not self._saves or save is None or local or kwargs.get('release'):
            return original(iteration, *args, **kwargs)
        within = self._not_kept_in(save) if non_persistent_ckpt else save
        write = partial(self._write, _folder(within, iteration), rng)

        def schedule(original: Callable[..., object], async_request: AsyncRequest) -> None:
            async_request.add_finalize_fn(write)
            original(async_request)

        with patches.wrapped(_SCHEDULING, schedule):
            result = original(iteration, *args, **kwargs)
        write()
        return result

    def load(
        self, original: Callable[..., tuple[int, float]], *args: object, **kwargs: object
    ) -> tuple[int, float]:
        """Run upstream's load, then restore this rank's own states.

        Without stored states, the generator of the experts keeps the state it had before the load,
        unless this rank has the experts of the first rank: upstream's state is then the right one.
        The model's initialisation has drawn from that generator, so without later draws the state
        is right.
        """
        tracker, experts = get_cuda_rng_tracker(), get_expert_parallel_rng_tracker_name()
        made = tracker.get_states().get(experts)
        result = original(*args, **kwargs)
        if not self._loads:
            return result
        folders = [_folder(place, int(result[0])) for place in self._places()]
        kept = next(filter(None, map(self._read, folders)), None)
        if kept is not None:
            restore_rng(kept.rng)
            return result
        if made is not None and not _shares_experts():
            tracker.set_states(tracker.get_states() | {experts: made})
        self._log_missing(int(result[0]), folders)
        return result

    def _log_missing(self, iteration: int, folders: list[Path]) -> None:
        """Warn once for the job, or on each rank whose states alone are missing."""
        alone = any(folder.is_dir() for folder in folders)
        if self._experts_draw and (alone or self._facts.rank == 0):
            logger.warning(
                'the dense checkpoint of iteration %d has no random numbers of rank %d: it is of '
                'plain Megatron, of another layout or damaged. With '
                '--moe-router-force-load-balancing experts draw again from their seed, and bits '
                'differ from those of an uninterrupted run.',
                iteration,
                self._facts.rank,
            )

    def _places(self) -> Iterator[str]:
        """Directories that may contain the loaded checkpoint."""
        if self._facts.load is not None:
            yield self._facts.load
            yield self._not_kept_in(self._facts.load)

    def _not_kept_in(self, directory: str) -> str:
        within = os.path.join(directory, 'non_persistent')
        return str(self._facts.non_persistent_global_ckpt_dir or within)

    def _file(self, folder: Path) -> Path:
        return folder / f'random-{self._facts.rank:05d}'

    def _write(self, folder: Path, rng: RngState) -> None:
        try:
            if '://' in str(self._facts.save):
                raise OSError(f'{self._facts.save} is in no file system')
            kept = _Kept(
                version=_VERSION,
                topology=self._topology,
                checkpoint=_digest_of(folder.parent),
                rng=rng,
            )
            encoded = msgspec.msgpack.encode(kept)
            folder.mkdir(parents=True, exist_ok=True)
            writing = self._file(folder).with_suffix('.writing')
            writing.write_bytes(xxhash.xxh3_64_digest(encoded) + encoded)
            writing.rename(self._file(folder))
        except OSError as error:  # the checkpoint is complete without them
            logger.warning(
                'random numbers of rank %d are not kept with the dense checkpoint: %s',
                self._facts.rank,
                error,
            )

    def _read(self, folder: Path) -> _Kept | None:
        """States in a folder; None if missing, damaged, or of another rank or checkpoint."""
        try:
            content = self._file(folder).read_bytes()
            encoded = content[_CHECKSUM_BYTES:]
            if xxhash.xxh3_64_digest(encoded) != content[:_CHECKSUM_BYTES]:
                return None
            kept = _KEPT.decode(encoded)
            expected = _VERSION, self._topology, _digest_of(folder.parent)
        except (OSError, msgspec.MsgspecError):
            return None
        return kept if (kept.version, kept.topology, kept.checkpoint) == expected else None


def _folder(directory: str, iteration: int) -> Path:
    return Path(directory) / f'iter_{iteration:07d}' / _FOLDER


def _digest_of(checkpoint: Path) -> str:
    for pattern in _TELLING:
        for path in sorted(checkpoint.glob(pattern)):
            with open(path, 'rb') as file:
                return xxhash.xxh3_64_hexdigest(file.read(_HEAD_BYTES))
    return ''


def _shares_experts() -> bool:
    """True if the rank whose states upstream saves for this stage has the same experts."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    same = parallel_state.get_expert_data_parallel_group()
    first = torch.distributed.get_process_group_ranks(group)[0]
    return first in torch.distributed.get_process_group_ranks(same)
