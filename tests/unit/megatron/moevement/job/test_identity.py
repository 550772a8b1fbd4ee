# SPDX-License-Identifier: Apache-2.0
"""Settings that may change a bit of training change the run; paths and launch settings do not."""

import argparse
import enum
import functools
import operator
import subprocess
import sys
import tomllib
from argparse import Namespace
from functools import partial
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.training.arguments import add_megatron_arguments
from torch.distributed import HashStore

from megatron.moevement.arguments import add_arguments
from megatron.moevement.job import flags as known_flags
from megatron.moevement.job import identity
from megatron.moevement.job.declared import TrainingPlan, facts_of_loop, settings_of_loop
from megatron.moevement.job.flags import not_localized, refuse_unsupported
from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.membership.report import Report
from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.memory.window.refusal import OtherSettings
from moevement_ext.memory.window.settings import Layout, Placed, differences, encode
from moevement_ext.memory.window.slot import FORMAT_VERSION, SlotHeader
from moevement_ext.recover import launched_alike
from moevement_ext.recover.inventory import launch_of
from tests.support.each import each

ROOT = Path(__file__).resolve().parents[5]

DATA = tomllib.loads(Path(__file__).with_name('flags.toml').read_text('utf-8'))
WORDS = {name: words.split() for name, words in DATA['identity'].items()}


@functools.cache
def _parser() -> argparse.ArgumentParser:
    return add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


def parsed(*flags: str) -> Namespace:
    return _parser().parse_args(flags)


@pytest.fixture(scope='module')
def defaults() -> Namespace:
    """Default values of upstream's parser, with the values that its validation adds."""
    args = parsed()
    args.rank, args.world_size, args.data_parallel_size = 0, 4, 2
    return args


def _changed(args: Namespace, name: str) -> Namespace:
    return Namespace(**{**vars(args), name: ('another value', getattr(args, name))})


def _identities(args: Namespace) -> tuple[str, str, str]:
    known = vars(args)
    training = identity.training_identity(known, 'run')
    return identity.run_identity(known, 'run'), identity.topology_identity(known), training


def _equal(args: Namespace, other: Namespace) -> tuple[bool, ...]:
    """Whether run, layout and training are the same."""
    return tuple(map(operator.eq, _identities(args), _identities(other)))


@each(
    'name, equal',
    [
        *((name, (False, True, False)) for name in WORDS['decisive']),
        *((name, (True, True, True)) for name in WORDS['indifferent']),
        *((name, (True, False, True)) for name in WORDS['layout']),
        *((name, (True, False, True)) for name in sorted(known_flags.LAYOUT)),
        *((name, (False, True, True)) for name in sorted(known_flags.MAY_CHANGE)),
    ],
)
def test_flags_change_run_layout_or_training(
    defaults: Namespace, name: str, equal: tuple[bool, ...]
) -> None:
    known = Namespace(**{name: None, **vars(defaults)})  # validation sets some of them
    assert _equal(_changed(known, name), known) == equal


def test_digests_are_stable_across_versions() -> None:
    """Otherwise a new version would refuse the windows of an earlier one."""
    settings = {
        'seed': 1234,
        'lr': 1e-3,
        'params_dtype': torch.bfloat16,
        'save': 'dense',
        'pipeline_model_parallel_size': 4,
        'data_path': ['0.3', 'a'],
    }
    assert identity.run_identity(settings, 'run') == '0977363092b188ec'
    assert identity.topology_identity(settings) == '242838eb632384da'


def test_default_batch_may_be_written_out(defaults: Namespace) -> None:
    """Of the two, only the size reaches training."""
    said, unsaid = (
        Namespace(**vars(defaults), _is_global_batch_size_explicitly_specified=said)
        for said in (True, False)
    )
    assert all(_equal(said, unsaid))


def test_query_groups_count_only_with_grouped_attention(defaults: Namespace) -> None:
    """Upstream's memory report changes the number, which a dense checkpoint then holds."""
    other = _changed(defaults, 'num_query_groups')
    assert _identities(other) == _identities(defaults)
    told, by_default = (identity.run_settings(vars(args), '') for args in (other, defaults))
    assert told.flags == by_default.flags
    grouped = _changed(defaults, 'group_query_attention')
    assert _identities(_changed(grouped, 'num_query_groups')) != _identities(grouped)


@pytest.mark.parametrize('flag', ['finetune', 'no_load_optim', 'no_load_rng'])
def test_other_checkpoint_to_start_from_is_another_run(defaults: Namespace, flag: str) -> None:
    """Else the windows of the first run would go on with its weights in the second."""
    first, other = (
        Namespace(**{**vars(defaults), flag: True, 'load': path}) for path in ('base-a', 'base-b')
    )
    assert _identities(first) != _identities(other)
    assert _identities(first) == _identities(Namespace(**vars(first)))


def test_every_flag_counts_unless_listed(defaults: Namespace) -> None:
    """A flag that upstream adds is in no list, so it counts."""
    named = known_flags.INDIFFERENT | known_flags.LAYOUT
    defaults = Namespace(**{**vars(defaults), 'group_query_attention': True})
    for name in vars(defaults).keys() - {'sparse_ckpt_strategy'}:  # tested below
        changed = _identities(_changed(defaults, name)) != _identities(defaults)
        indifferent = name in known_flags.INDIFFERENT or name.startswith('sparse_ckpt')
        assert changed is not indifferent, name
    assert _identities(Namespace(**vars(defaults), new_flag=1)) != _identities(defaults)
    flags = {*vars(defaults), 'timeout', 'timers'}
    misspelt = {name for name in named - flags if name not in WORDS['set_by_validation']}
    assert misspelt == set()


def test_new_upstream_flag_changes_the_run_and_is_named() -> None:
    """With another value of it, windows and new processes are refused."""
    parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    parser.add_argument('--moe-router-made-up-noise', type=float, default=0.0)
    was, now = (
        _identity_of_rank(parser.parse_args(flags))
        for flags in ([], ['--moe-router-made-up-noise', '0.5'])
    )
    assert was.settings.flags['--moe-router-made-up-noise'] == '0.0'
    assert was.run != now.run and was.topology == now.topology
    with pytest.raises(OtherSettings, match=r'--moe-router-made-up-noise: was 0\.0, is 0\.5$'):
        Expected.of(now).check(_captured_by(was), Path('window'))
    store, survivor = HashStore(), Report(True, 'a', 1, [], launched=launch_of(was))
    launched_alike.leave(store, was)
    assert launched_alike.why_not(store, [survivor], now, strict=False) == (
        'rank 0 has other settings than the job it joins: --moe-router-made-up-noise: the job '
        '0.0, rank 0 0.5'
    )


def _identity_of_rank(args: Namespace) -> RankIdentity:
    args.rank, args.world_size, args.data_parallel_size = 0, 4, 2
    return identity.rank_identity(vars(args), 0, SparseCheckpointConfig(run_id='run'))


def test_windows_of_another_strategy_are_refused() -> None:
    settings = vars(parsed('--sparse-ckpt'))

    def with_strategy(**given: Any) -> RankIdentity:
        return identity.rank_identity(settings, 0, SparseCheckpointConfig(run_id='run', **given))

    moevement, gemini = with_strategy(), with_strategy(strategy='gemini')
    every_fifth = with_strategy(strategy='gemini', interval=5)
    assert gemini == every_fifth != moevement
    header = _captured_by(moevement)
    with pytest.raises(OtherSettings, match='--sparse-ckpt-strategy: was moevement, is gemini'):
        Expected.of(gemini).check(header, Path('window'))
    Expected.of(moevement).check(header, Path('window'))


def _captured_by(rank: RankIdentity) -> SlotHeader:
    """The first slot of a window that a rank has captured."""
    return SlotHeader(
        version=FORMAT_VERSION,
        run=rank.run,
        topology=rank.topology,
        owner=rank.rank,
        start=0,
        window=1,
        slot=0,
        iteration=0,
        plan='plan',
        payload_bytes=0,
        records=[],
        settings=encode(rank.settings),
    )


class Shade(enum.Enum):
    WEIGHTS = enum.auto()
    DARK = enum.auto()


def _scaled(scale: float) -> Any:
    def function(value: float) -> float:
        return scale * value

    return function


@each(
    'one, other',
    [
        (torch.bfloat16, torch.float16),
        (Shade.WEIGHTS, Shade.DARK),
        (torch.nn.functional.silu, torch.nn.functional.gelu),
        (partial(torch.nn.init.normal_, std=0.1), partial(torch.nn.init.normal_, std=0.2)),
        (_scaled(1.0), _scaled(2.0)),
        (PurePosixPath('a'), PurePosixPath('b')),
        ({'b', 'a'}, {'a', 'c'}),
        ({1: 'a', (2, 3): 'b'}, {1: 'a', (2, 3): 'c'}),
        (SimpleNamespace(inner=SimpleNamespace(v=1)), SimpleNamespace(inner=SimpleNamespace(v=2))),
        (float('nan'), None),
        (1, '1'),
        (True, 1),
    ],
)
def test_values_of_any_type_are_distinguished(one: Any, other: Any) -> None:
    digests = {identity.run_identity({'value': value}, '') for value in (one, other)}
    assert len(digests) == 2


def own_loop(lr: float = 1e-3, **named: object) -> dict[str, object]:
    """Settings that `attach` derives from configurations, with callables, enums and dtypes."""
    model = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=2)
    optimizer = OptimizerConfig(lr=lr)
    plan = TrainingPlan(10, seq_length=8, micro_batch_size=1, global_batch_size=4)
    facts = facts_of_loop(model, optimizer, plan)
    ddp = DistributedDataParallelConfig()
    settings = settings_of_loop(model, optimizer, ddp, plan, facts, named)
    return {**settings, 'names': {'some', 'names', 'in', 'a', 'set'}, 'build': _scaled(3.0)}


def test_settings_that_a_loop_names_count() -> None:
    one, other = (own_loop(data=Path(name)) for name in ('/a', '/b'))
    assert identity.run_identity(one, 'run') != identity.run_identity(other, 'run')
    found = differences(*(identity.run_settings(item, 'run') for item in (one, other)))
    assert found.decisive == ['--settings.data: was /a, is /b']


def test_other_arguments_of_a_loop_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    for seed in '12':
        monkeypatch.setattr(sys, 'argv', ['loop.py', 'run', '--seed', seed, '--lr=-0.1', '--fast'])
        launched.append(own_loop())
    assert len({identity.run_identity(item, 'run') for item in launched}) == 1
    found = differences(*(identity.run_settings(item, 'run') for item in launched))
    assert not found.decisive and found.doubtful == ['--seed: was 1, is 2']
    told = identity.run_settings(launched[0], 'run').environment
    assert (told['arguments'], told['--lr'], told['--fast']) == ('run', '-0.1', '')


def test_configurations_have_the_same_identity_in_another_process() -> None:
    code = (
        'from tests.unit.megatron.moevement.job.test_identity import own_loop\n'
        'from megatron.moevement.job import identity\n'
        'print(identity.run_identity(own_loop(), "run"))'
    )
    found = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert found.stdout.split()[-1] == identity.run_identity(own_loop(), 'run')
    assert identity.run_identity(own_loop(lr=1e-4), 'run') not in found.stdout


def test_configurations_lack_the_flags_of_upstreams_trainer() -> None:
    settings = own_loop()
    assert not {'skip_train', 'rerun_mode'} & settings.keys()
    refuse_unsupported(settings)
    assert not_localized(settings) is None
    assert '--async-save' in str(not_localized({**settings, 'async_save': True}))


def test_rank_identity_has_layout_and_seat() -> None:
    args = parsed('--pipeline-model-parallel-size', '2', '--use-distributed-optimizer')
    args.rank, args.world_size, args.data_parallel_size = 0, 4, 2
    config = SparseCheckpointConfig(run_id='run')
    found = [identity.rank_identity(vars(args), rank, config) for rank in range(4)]
    placed = [one.placed for one in found if isinstance(one.placed, Placed)]
    assert [(one.seat.pipeline, one.seat.data) for one in placed] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert {one.layout for one in placed} == {Layout(4, pipeline=2, data=2, sharded=True)}
    assert '--use-distributed-optimizer' in found[0].settings.layout
