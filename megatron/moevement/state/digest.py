# SPDX-License-Identifier: Apache-2.0
"""SHA-256 digests of the whole training state, to compare two runs bit for bit."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from megatron.moevement.built import Chunks, MegatronOptimizer, OptimizerParamScheduler
from megatron.moevement.counters import Counters
from megatron.moevement.state import iteration_state, stored
from megatron.moevement.state.model_operators import operator_inventory
from megatron.moevement.state.optimizer_state import (
    chained,
    counts_steps_per_parameter,
    parameter_states,
)
from moevement_ext.config import ConfigurationError


def state_digest(
    model: Chunks,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    counters: Counters,
) -> dict[str, str]:
    """Digest of every tensor and of the small state of this rank, by name."""
    entries = dict(_tensors(model, optimizer))
    rng = iteration_state.capture_rng()
    entries |= {
        'rng/python': _sha(repr(rng.python).encode()),
        'rng/numpy': _sha(repr(rng.numpy).encode()),
        'rng/torch': _sha(rng.torch),
        'rng/cuda': _sha(rng.cuda),
        **{f'rng/{name}': _sha(state) for name, state in rng.tracker.items()},
        'scheduler/num_steps': _sha(repr(scheduler.num_steps).encode()),
        'loss_scale': _sha_tensor(optimizer.get_loss_scale()),
        'consumed_train_samples': _sha(repr(counters.consumed_train_samples).encode()),
        'skipped_train_samples': _sha(repr(counters.skipped_train_samples).encode()),
    }
    # A `step` of a group is then a remnant of a dense checkpoint.
    per_parameter = all(counts_steps_per_parameter(one.optimizer) for one in chained(optimizer))
    for index, group in enumerate(optimizer.param_groups):
        settings = {key: group.get(key) for key in ('lr', 'weight_decay')}
        if not per_parameter:
            settings['step'] = group.get('step')
        entries[f'group/{index}'] = _sha(repr(settings).encode())
    return entries


def write_digest(path: str, iteration: int, entries: dict[str, str]) -> None:
    """Gather the digests of all ranks and write them as JSON on rank 0. Collective."""
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, entries)
    if torch.distributed.get_rank() != 0:
        return
    by_rank = {str(rank): found for rank, found in enumerate(ranks)}
    total = _sha(msgspec.json.encode(by_rank, order='deterministic'))
    report = {'digest': total, 'iteration': iteration, 'ranks': by_rank}
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(target)
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    partial.rename(target)


def refuse_unwritable(path: str) -> None:
    """Check before training that the file of `--sparse-ckpt-digest` can be written.

    Raises:
        ConfigurationError: it cannot be written.
    """
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError('it is a directory')
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = _partial(target)
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise ConfigurationError(
            f'--sparse-ckpt-digest {path}: digests cannot be written there: {error}. '
            'Give a file that this user can write, or leave the flag out.'
        ) from error


def _partial(target: Path) -> Path:
    return target.with_suffix(target.suffix + '.partial')


def _tensors(model: Chunks, optimizer: MegatronOptimizer) -> Iterator[tuple[str, str]]:
    names = {}
    for operator in operator_inventory(model).values():
        for name, parameter in operator.parameters.items():
            names[parameter] = name
            yield f'parameter/{name}', _sha_tensor(stored.raw(parameter))
            weight_scale = stored.weight_scale(parameter)
            if weight_scale is not None:
                yield f'weight_scale/{name}', _sha_tensor(weight_scale)
        for name, buffer in operator.buffers.items():
            yield f'buffer/{name}', _sha_tensor(buffer)
        for name, state in operator.scaling.items():
            yield f'scaling/{name}', _sha_tensor(state)
    for held in parameter_states(optimizer, names).values():
        yield f'master/{held.name}', _sha_tensor(stored.raw(held.main))
        for key, value in sorted(held.inner.state[held.main].items()):
            if torch.is_tensor(value):
                yield f'{key}/{held.name}', _sha_tensor(stored.raw(value))
        for key, scale in held.scales().items():
            yield f'{key}/{held.name}', _sha_tensor(scale)


def _sha_tensor(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return _sha(flat.view(torch.uint8).numpy().tobytes())


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
