# SPDX-License-Identifier: Apache-2.0
"""The run of W&B that upstream's own function begins; in jobs: `distributed/test_reporting.py`."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron.training import global_vars

from megatron.moevement.seams import patches, wandb_run
from tests.distributed.harness import wandb_stand_in

NAMES = ('WANDB_RUN_ID', 'WANDB_RESUME')
Begin = Callable[..., list[str]]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Begin]:
    """Begins a run in a new process with these arguments, and returns what W&B would read."""
    for name in NAMES:
        monkeypatch.setenv(name, '')
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, 'wandb', None)
    wandb_stand_in.install()

    def begun(**changed: Any) -> list[str]:
        args = arguments(tmp_path, **changed)
        monkeypatch.setattr(global_vars, '_GLOBAL_WANDB_WRITER', None)
        for name in () if 'user' in changed else NAMES:
            os.environ.pop(name, None)
        global_vars._set_wandb_writer(args)
        found = [*tmp_path.rglob(wandb_stand_in.RUNS)]
        lines = [line for file in found for line in file.read_text().splitlines()]
        for file in found:
            file.unlink()
        return lines

    part = 'megatron.training.global_vars:_set_wandb_writer'
    with patches.wrapped(part, wandb_run._go_on):
        yield begun


def arguments(folder: Path, **changed: Any) -> Namespace:
    defaults = {
        'rank': 3, 'world_size': 4, 'save': str(folder / 'dense'), 'wandb_save_dir': '',
        'wandb_project': 'any', 'wandb_exp_name': 'a/b', 'wandb_entity': '',
    }  # fmt: skip
    return Namespace(**defaults | changed)


def test_job_keeps_its_run_until_it_has_finished(begin: Begin, tmp_path: Path) -> None:
    first = begin()
    assert first[0].endswith(' allow') and not first[0].startswith('None')
    assert begin() == first
    others = [begin(wandb_exp_name='c'), begin(save=str(tmp_path / 'other'))]
    assert len({*map(tuple, [first, *others])}) == 3
    wandb_run.forget(arguments(tmp_path))
    assert begin() != first


def test_user_decides(begin: Begin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv('WANDB_RUN_ID', 'mine')
    monkeypatch.setenv('WANDB_RESUME', 'must')
    assert begin(user=True) == ['mine must']
    assert not [*tmp_path.rglob('*.id')]


@pytest.mark.parametrize('changed', [{'rank': 2}, {'wandb_project': ''}])
def test_processes_without_a_run_leave_all_alone(changed: dict[str, Any], begin: Begin) -> None:
    assert begin(**changed) == []
    assert not os.environ.keys() & {*NAMES}


def test_folder_without_room_costs_no_training(
    begin: Begin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / 'dense' / 'wandb' / 'sparse-ckpt-a%2Fb.id').mkdir(parents=True)
    assert begin() == ['None allow']
    assert 'W&B begins another run after a failure' in caplog.text
