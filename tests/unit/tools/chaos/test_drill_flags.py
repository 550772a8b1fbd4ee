# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tools.chaos.drill_flags import drill_flags
from tools.lab.errors import LabError
from tools.lab.trainer_flags import value_of

OWN = [
    '--lr-decay-iters', '5000', '--train-iters', '60', '--log-interval', '1', '--sparse-ckpt',
    '--sparse-ckpt-run-id', 'drill-1', '--sparse-ckpt-events', '/e/events',
    '--sparse-ckpt-digest', '/e/digest.json',
]  # fmt: skip


def made(*given: str) -> list[str]:
    return drill_flags(given, 60, 'drill-1', Path('/e'))


def test_nothing_of_the_real_run_is_touched() -> None:
    """Neither its checkpoints, nor its windows, nor its logs."""
    own = '--save /ckpt --load=/ckpt --save-interval 5 --sparse-ckpt --sparse-ckpt-run-id real'
    own += ' --sparse-ckpt-events /real --tensorboard-dir /tb --exit-interval 7 --async-save'
    own += ' --train-iters 5000 --log-interval 10'
    assert made(*own.split()) == OWN


def test_store_of_one_run_is_left_out() -> None:
    assert made('--train-iters', '5000', '--sparse-ckpt-store', '10.0.0.5:29400') == OWN


def test_other_flags_stay() -> None:
    own = '--bf16 --data-path 0.3 a 0.7 b --split 98,2,0 --seed=7 --train-iters=5000'.split()
    own += ['--sparse-ckpt-window', '3', '--lr', '-1e-3']
    kept = '--bf16 --data-path 0.3 a 0.7 b --split 98,2,0 --seed 7'.split()
    assert made(*own) == [*kept, '--sparse-ckpt-window', '3', '--lr', '-1e-3', *OWN]


def test_the_schedule_is_that_of_the_whole_run() -> None:
    """Else a warm-up longer than the drill would be refused."""
    assert made('--train-iters', '9', '--lr-decay-iters', '7')[:2] == ['--lr-decay-iters', '7']
    assert '--lr-decay-iters' not in made('--bf16')
    assert value_of(['--a', '1', '--b', '--a=2'], '--a') == '2'
    assert value_of(['--a'], '--a') is None


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--train-samples', '7'], '--train-samples: give a drill --train-iters'),
        (['--sparse-ckpt-verify', 'off'], '--sparse-ckpt-verify off: a drill is to verify'),
    ],
)
def test_flags_that_exclude_a_drill_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(LabError, match=message):
        made(*flags)
