# SPDX-License-Identifier: Apache-2.0
"""Invalid flags end the program in a line; facts of a job that are worked out of arguments."""

import argparse
from argparse import Namespace

import pytest
import torch

from megatron.moevement.arguments import add_arguments, config_from_args
from megatron.moevement.facts import facts_of
from moevement_ext.config import ConfigurationError, SparseCheckpointConfig, flagged
from tests.unit.megatron.moevement.job.test_identity import parsed


def parse(*flags: str) -> argparse.Namespace:
    return add_arguments(argparse.ArgumentParser(prog='train')).parse_args(flags)


@pytest.mark.parametrize(('text', 'window'), [('auto', 'auto'), ('6', 6)])
def test_window_is_a_number_or_auto(text: str, window: int | str) -> None:
    assert parse('--sparse-ckpt-window', text).sparse_ckpt_window == window


@pytest.mark.parametrize(
    ('text', 'rate'), [('auto', 'auto'), ('off', 'off'), ('0', 0), ('2.5', 2.5)]
)
def test_rate_is_a_number_or_a_word(text: str, rate: float | str) -> None:
    flag = '--sparse-ckpt-network-gb-per-s'
    assert parse(flag, text).sparse_ckpt_network_gb_per_s == rate


def flags_of_the_group() -> list[argparse.Action]:
    parser = argparse.ArgumentParser(prog='train')
    before = {action.dest for action in parser._actions}
    return [one for one in add_arguments(parser)._actions if one.dest not in before]


CHECKED = [one for one in flags_of_the_group() if one.nargs != 0 and (one.type or one.choices)]


@pytest.mark.parametrize('action', CHECKED, ids=lambda action: action.option_strings[0])
def test_invalid_value_is_refused_in_one_line(
    action: argparse.Action, capsys: pytest.CaptureFixture[str]
) -> None:
    (flag,) = action.option_strings
    with pytest.raises(SystemExit) as ended:
        parse(flag, 'no-such-value')
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f'train: error: argument {flag}: ') and 'no-such-value' in line


NUMBERS = [one for one in CHECKED if not one.choices]


@pytest.mark.parametrize('action', NUMBERS, ids=lambda action: action.option_strings[0])
def test_negative_number_is_refused(
    action: argparse.Action, capsys: pytest.CaptureFixture[str]
) -> None:
    (flag,) = action.option_strings
    args = parse('--sparse-ckpt', f'{flag}=-1')
    with pytest.raises(ConfigurationError, match=f'^{flag}') as refused:
        config_from_args(args)  # type: ignore[arg-type]
    assert len(str(refused.value).splitlines()) == 1


def shown_help() -> str:
    return ' '.join(add_arguments(argparse.ArgumentParser(prog='train')).format_help().split())


def test_help_of_a_flag_is_in_the_metadata_of_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('COLUMNS', '100000')  # hyphens too stay on their line
    shown = shown_help()
    assert [one.name for one in flagged() if one.metadata['help'] not in shown] == []


def test_percent_in_a_text_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '5% of %(prog)s, 100%.'
    window = SparseCheckpointConfig.__dataclass_fields__['window']
    monkeypatch.setattr(window, 'metadata', {'help': text})
    assert text in shown_help()


@pytest.fixture
def args() -> Namespace:
    """Arguments after upstream's validation."""
    args = parsed()
    vars(args).update(
        rank=1,
        world_size=4,
        data_parallel_size=2,
        params_dtype=torch.bfloat16,
        distributed_timeout_minutes=5,
        save='checkpoints',
        save_interval=10,
    )
    return args


def test_largest_batch_of_a_growing_schedule_counts(args: Namespace) -> None:
    args.global_batch_size, args.step_batch_size_schedule = 4, '0:4, 1M:12 2M:8'
    assert facts_of(args).global_batch_size == 12


def test_replicas_are_no_source_if_each_draws_numbers_of_its_own(args: Namespace) -> None:
    assert facts_of(args).copies_from_peers
    args.mtp_hsm = True  # megatron-core 0.20
    assert not facts_of(args).copies_from_peers


@pytest.mark.parametrize(('in_fp32', 'dtype'), [(False, torch.bfloat16), (True, torch.float32)])
def test_boundary_dtype_is_that_of_the_residual_connection(
    in_fp32: bool, dtype: torch.dtype, args: Namespace
) -> None:
    args.fp32_residual_connection = in_fp32
    assert facts_of(args).boundary_dtype is dtype
