# SPDX-License-Identifier: Apache-2.0
"""The identity of a run: windows of another run or another layout are refused by name.

There are three digests. The digests of the run and of the parallel layout together decide whether
windows can be loaded unchanged. The training digest omits the settings of the run that may change
with the layout (`MAY_CHANGE`); it identifies windows that the same training captured in another
layout.

The digests cover flags only. `run_settings` holds the flags by name, the content of files (see
`named_files`), versions and environment variables (see `computing`).

Every setting counts except those that cannot change a bit of training (see `flags`). The parallel
layout has a separate digest, so that a refusal can state whether run or layout differ.

`--train-iters` counts (`--train-samples` likewise): the learning rate decays over it by default,
weight decay grows over it, and upstream shuffles datasets over as many epochs as all samples of the
run need. With a larger number, a replay could read other samples than the original iterations did.
A finished job leaves no windows, so the rule affects only a job that is extended after a failure:
that job resumes from its dense checkpoint. Evaluation flags count, as evaluation may draw random
numbers, and so does `--ckpt-step`, which selects a checkpoint.
"""

import enum
import functools
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import PurePath
from typing import cast

import torch
import xxhash

from megatron.moevement.facts import Settings
from megatron.moevement.job import computing, named_files, placing
from megatron.moevement.job.flags import LAYOUT, MAY_CHANGE, counts
from moevement_ext.config import MOEVEMENT, OFF, SparseCheckpointConfig, slurm_run_id
from moevement_ext.memory.shelf import directory_of
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.memory.window.settings import Placed, RunSettings, Table, bounded

# With one of these flags, training does not continue the dense checkpoint's run: it begins a new
# one.
_OTHER_START = ('finetune', 'no_load_optim', 'no_load_rng')

_STRATEGY = 'sparse_ckpt_strategy'
_SLOTS = 'sparse_ckpt_expert_slots'
ARGUMENTS = 'sparse_ckpt_arguments'
"""Name of a setting with the arguments of a program that is not upstream's, by flag. They do not
count, as some may change no bit; a difference is reported."""

_PLAIN = (type(None), bool, float, str, bytes, torch.dtype, torch.device, PurePath, timedelta)


def run_identity(settings: Settings, run_id: str) -> str:
    """Digest of the run id and of all settings that may affect bits."""
    return _digest({'run id': run_id, **_counting(settings)})


def _counting(settings: Settings) -> dict[str, object]:
    """Settings that count, by name.

    The strategy counts, although it changes no bit: its windows have other content. So do slots
    for experts, if there are any.

    The dense checkpoint of `--load` is left out, as a resumed job may load its own checkpoint. It
    counts with the flags that begin a new run from a checkpoint (`_OTHER_START`).

    The number of query groups is left out where it is unused: with `--use-checkpoint-args` it is 1
    before the first checkpoint, and the number of heads afterwards.
    """
    found = {name: value for name, value in settings.items() if counts(name)}
    found[_STRATEGY] = settings.get(_STRATEGY, MOEVEMENT)
    if settings.get(_SLOTS):
        found[_SLOTS] = settings[_SLOTS]
    if any(settings.get(name) for name in _OTHER_START):
        found['load'] = settings.get('load')
    if not found.get('group_query_attention'):
        found.pop('num_query_groups', None)
    return found


def _with_config(settings: Settings, config: SparseCheckpointConfig) -> Settings:
    """`settings` with those of `config` that count."""
    slots = config.expert_slots, config.expert_replicas, config.expert_rebalance
    return {
        **settings,
        _STRATEGY: config.strategy,
        _SLOTS: [*slots] if config.expert_slots else None,
    }


def training_identity(settings: Settings, run_id: str) -> str:
    """Digest of the settings that are equal in all layouts: data, schedules, seeds, model."""
    counting = _counting(settings)
    kept = {name: value for name, value in counting.items() if name not in MAY_CHANGE}
    return _digest({'run id': run_id, **kept})


def topology_identity(settings: Settings) -> str:
    """Digest of the parallel layout."""
    return _digest({name: settings.get(name) for name in LAYOUT})


def rank_identity(settings: Settings, rank: int, config: SparseCheckpointConfig) -> RankIdentity:
    """The stamp of every slot of this rank."""
    run_id = called(settings, config)
    settings = _with_config(settings, config)
    run, topology = run_identity(settings, run_id), topology_identity(settings)
    own = run_settings(settings, run_id)
    layout = placing.layout_of(settings)
    if layout is None or config.expert_slots:  # several ranks have the same tensors
        return RankIdentity(run, topology, rank, own)
    seat = placing.seat_of(rank, layout, bool(settings.get('use_tp_pp_dp_mapping')))
    placed = Placed(training_identity(settings, run_id), layout, seat)
    return RankIdentity(run, topology, rank, own, placed)


def run_settings(settings: Settings, run_id: str) -> RunSettings:
    """Settings of this launch by name, to report how two launches differ."""
    counting = _counting(settings)
    changing = {name: settings.get(name) for name in LAYOUT | (MAY_CHANGE & counting.keys())}
    layout = {_flag(name): _shown(value) for name, value in changing.items()}
    flags = {
        _flag(name): _shown(value) for name, value in counting.items() if name not in MAY_CHANGE
    }
    on_cpu = settings.get('distributed_backend') == 'gloo'
    return bounded(
        RunSettings(
            flags={'--sparse-ckpt-run-id': run_id, **flags},
            layout=layout,
            files=named_files.held_by_files(settings),
            versions={**computing.versions(on_cpu), **named_files.code(settings)},
            environment={
                **computing.environment(),
                **named_files.other_files(settings, counts),
                **cast(Table, settings.get(ARGUMENTS, {})),
            },
        )
    )


def run_name(settings: Settings, config: SparseCheckpointConfig) -> str:
    """Directory name of the run; with `--sparse-ckpt-elastic`, one per layout."""
    name = called(settings, config)
    if config.elastic == OFF:
        return name
    settings = _with_config(settings, config)
    counting = run_identity(settings, name), topology_identity(settings)
    return directory_of(name, xxhash.xxh3_64_hexdigest('/'.join(counting).encode()))


def called(settings: Settings, config: SparseCheckpointConfig) -> str:
    """Name of the run: from the flag, else from Slurm's job id, else a digest of settings."""
    if config.run_id is not None:
        return config.run_id
    of_slurm = slurm_run_id()
    if of_slurm is not None:
        return of_slurm
    digest = run_identity if config.elastic == OFF else training_identity
    return f'run-{digest(_with_config(settings, config), "")}'


def _flag(name: str) -> str:
    return f'--{name.replace("_", "-")}'


def _shown(value: object) -> str:
    """A value in command line syntax, if it is simple."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ' '.join(value)
    return _text(value)


def _digest(settings: Settings) -> str:
    # Paths may contain bytes that are not UTF-8.
    return xxhash.xxh3_64_hexdigest(_text(settings).encode(errors='surrogateescape'))


def _text(value: object) -> str:
    """A value as text that is equal in every process: without addresses, in a fixed order."""
    if isinstance(value, _PLAIN) or type(value) is int:
        return repr(value)
    if isinstance(value, Mapping):
        return _joined(sorted(f'{_text(key)}:{_text(item)}' for key, item in value.items()))
    if isinstance(value, (set, frozenset)):
        return _joined(sorted(map(_text, value)))
    if isinstance(value, (list, tuple)):
        return _joined(map(_text, value))
    if isinstance(value, functools.partial):
        return _text([value.func, value.args, value.keywords])
    if hasattr(value, '__qualname__'):  # a function, method or class, with its closure
        closed_over = [cell.cell_contents for cell in getattr(value, '__closure__', None) or ()]
        return f'{value.__module__}.{value.__qualname__}{_text(closed_over)}'
    kind = f'{type(value).__module__}.{type(value).__qualname__}'
    if isinstance(value, enum.Enum):
        return f'{kind}.{value.name}'
    return kind + _text(getattr(value, '__dict__', {}))


def _joined(texts: Iterable[str]) -> str:
    return f'[{",".join(texts)}]'
