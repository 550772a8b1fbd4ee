# SPDX-License-Identifier: Apache-2.0
"""Upstream is patched only if it matches the checked version, and restored afterwards."""

import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from megatron.moevement import SparseCheckpointConfig, TrainingPlan, attach
from megatron.moevement.program import run_with_sparse_checkpointing
from megatron.moevement.seams import patches
from moevement_ext.errors import UserError
from tests.unit.megatron.moevement.job.test_identity import parsed

LOADER = 'megatron.training.training:build_pretraining_data_loader'
GATING = 'megatron.core.transformer.moe.router:router_gating_linear'
METHOD = 'megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict'
CALCULATOR = 'megatron.core.num_microbatches_calculator:StepBatchsizeNumMicroBatchesCalculator'
TIMER = 'megatron.core.timers:Timer.__init__'
GATHER = 'torch.distributed:all_gather_object'
PARTS = [*patches.UPSTREAM, *patches.TORCH]
ATTRIBUTES = [(holder, name) for holder, names in patches.ATTRIBUTES.items() for name in names]


def place_of(part: str) -> tuple[Any, str]:
    """Module or class, and the attribute name in it."""
    module, path = part.split(':')
    *outer, name = path.split('.')
    return functools.reduce(getattr, outer, importlib.import_module(module)), name


def found(part: str) -> Any:
    return getattr(*place_of(part))


def rename(holder: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a module, class or function as if upstream had given `name` another name."""
    owner = found(holder) if ':' in holder else importlib.import_module(holder)
    if not inspect.isfunction(owner):
        monkeypatch.delattr(owner, name)
        return
    names = tuple('renamed' if one == name else one for one in owner.__code__.co_names)
    monkeypatch.setattr(owner, '__code__', owner.__code__.replace(co_names=names))


def test_installed_version_passes_the_check() -> None:
    patches.check()


@pytest.mark.parametrize('part', PARTS)
def test_changed_part_is_named(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*place_of(part), lambda something_else: None)
    with pytest.raises(UserError, match='0.19.2') as refused:
        patches.check()
    assert str(refused.value).startswith(f'{part} has the parameters')


@pytest.mark.parametrize(
    ('target', 'named'),
    [
        (LOADER, 'build_pretraining_data_loader is not there'),
        ('megatron.core.timers:Timers', r'timers:Timers.__init__ is not there .*0.19.2'),
    ],
)
def test_missing_part_is_named(target: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(*place_of(target))
    with pytest.raises(UserError, match=named):
        patches.check()


@pytest.mark.parametrize(('holder', 'name'), ATTRIBUTES)
def test_renamed_attribute_is_named(
    holder: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename(holder, name, monkeypatch)
    with pytest.raises(UserError, match='Install megatron-core 0.19.2') as refused:
        patches.check()
    assert str(refused.value).startswith(f'{holder} has no {name}: this is not the version')


def test_wrapped_function_still_names_its_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    start = found(TIMER)
    monkeypatch.setattr(*place_of(TIMER), functools.wraps(start)(lambda *args: start(*args)))
    patches.check()


def test_renamed_attribute_is_refused_before_the_program_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rename(CALCULATOR, '_parse_schedule', monkeypatch)
    args = parsed('--sparse-ckpt', '--step-batch-size-schedule', '0:4 1M:8')
    args.rank = 0
    with pytest.raises(UserError, match='has no _parse_schedule'):
        run_with_sparse_checkpointing(lambda **given: None, args)


def test_changed_part_is_refused_before_the_rendezvous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a part that only a replay wraps."""
    monkeypatch.setattr(*place_of(GATING), lambda something_else: None)
    job = attach(
        SparseCheckpointConfig(dir=str(tmp_path)),
        TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=2),
        OptimizerConfig(lr=1e-3),
        DistributedDataParallelConfig(),
        TrainingPlan(10, seq_length=8, micro_batch_size=1, global_batch_size=4),
    )
    with pytest.raises(UserError, match='router_gating_linear'), job:
        pytest.fail('the job began')


def test_trailing_parameter_added_by_torch_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(*place_of(GATHER), lambda object_list, obj, group, new: None)
    patches.check()
    monkeypatch.setattr(*place_of(LOADER), lambda dataset, consumed_samples, new: None)
    with pytest.raises(UserError, match='build_pretraining_data_loader'):
        patches.check()


@pytest.mark.parametrize('part', [LOADER, METHOD, GATHER])
def test_wrapper_gets_the_original_and_the_arguments(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = found(part)
    monkeypatch.setattr(*place_of(part), original)  # restored at the end
    patches.wrap(part, lambda *args, **kwargs: (args, kwargs))
    assert found(part)(1, two=2) == ((original, 1), {'two': 2})
    patches.check()  # the signature is that of the original


def test_wrapper_gets_the_arguments_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    original = found(METHOD)
    monkeypatch.setattr(*place_of(METHOD), original)  # restored at the end
    patches.wrap(METHOD, lambda original, **call: (original, call), by_name=True)
    assert found(METHOD)(1, state_dict=2) == (original, {'self': 1, 'state_dict': 2})
    assert patches.shared({'self': 1, 'other': 2}, METHOD) == {'self': 1}
    patches.check()


@pytest.mark.parametrize('part', [LOADER, METHOD, GATHER])
def test_temporary_wrapper_is_removed_after_an_error(part: str) -> None:
    original = found(part)
    with pytest.raises(ZeroDivisionError), patches.wrapped(part, lambda *args: 1 / 0):
        found(part)()
    assert found(part) is original


@pytest.mark.parametrize('own', [False, True])
def test_function_of_an_object_is_replaced_until_undone(own: bool) -> None:
    class Upstream:
        def step(self) -> str:
            return 'step'

    one, other = Upstream(), Upstream()
    if own:
        patches.wrap_object(one, 'step', lambda step: f'own {step()}')
    before = dict(vars(one))
    undo = patches.wrap_object(one, 'step', lambda step, *args: (step(), args))
    assert (one.step(), other.step()) == (('own step' if own else 'step', ()), 'step')
    undo()
    assert vars(one) == before
    with pytest.raises(AssertionError, match='load'):
        patches.wrap_object(one, 'load', lambda load: None)


def test_functions_of_objects_are_checked_at_start() -> None:
    listed = {re.split('[.:]', part)[-1] for part in patches.UPSTREAM}
    assert {name.removesuffix('_func') for name in patches.OBJECTS} <= listed


def test_unlisted_part_is_not_wrapped() -> None:
    with pytest.raises(KeyError, match='cyclic_iter'):
        patches.wrap('megatron.training.training:cyclic_iter', lambda *args: None)
