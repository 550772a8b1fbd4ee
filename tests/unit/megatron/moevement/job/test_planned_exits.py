# SPDX-License-Identifier: Apache-2.0
"""A planned end frees the windows only if the next start can load the dense checkpoint."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.moevement import program
from moevement_ext.config import SparseCheckpointConfig


class _LeftError(Exception):
    """The process would have ended."""


def _calls(
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    load: str = 'dense',
    last_iteration: int = 8,
    **given: Any,
) -> list[str]:
    """Calls of the job at the end, after a dense checkpoint was saved."""

    def leave(status: int) -> None:
        raise _LeftError

    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(program, '_saved', lambda facts, iteration: True)
    monkeypatch.setattr(program, 'leave', leave)
    calls: list[str] = []
    job = SimpleNamespace(
        rank=SimpleNamespace(config=SparseCheckpointConfig(**given)),
        trainer=SimpleNamespace(last_iteration=last_iteration),
        committed=7,
        kept_in=None,
        end_together=lambda: None,
        part=lambda: calls.append('part'),
        finish=lambda code, remove: calls.append(f'finish({remove})'),
    )
    facts: Any = SimpleNamespace(rank=0, load=load, save='dense')
    session: Any = SimpleNamespace(job=job)
    with pytest.raises(_LeftError):
        program.exit_as_planned(facts, session, SystemExit(code))
    return calls


def test_dense_checkpoint_replaces_the_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _calls(0, monkeypatch) == ['finish(True)']


@pytest.mark.parametrize('load', ['dense', 'another'])
def test_windows_of_all_layouts_outlive_a_dense_checkpoint_of_one(
    load: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another number of stages could not load it."""
    assert _calls(0, monkeypatch, load, elastic='restart') == ['part', 'finish(False)']


def test_windows_of_a_job_that_is_done_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at its end without an exit: no launch continues from the last iteration."""
    assert _calls(0, monkeypatch, last_iteration=7, elastic='restart') == ['finish(True)']


def test_findings_of_the_rerun_machine_are_loaded_in_any_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _calls(16, monkeypatch, elastic='restart') == ['finish(True)']


@pytest.mark.parametrize(('code', 'load'), [(17, 'dense'), (16, 'another')])
def test_half_done_iteration_is_not_kept(
    code: int, load: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rerun machine restores no router biases; windows of before have whole iterations."""
    assert _calls(code, monkeypatch, load, elastic='restart') == ['finish(False)']
