# SPDX-License-Identifier: Apache-2.0
"""A planned end frees the windows only if the next start can load the dense checkpoint."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.training import training

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


@pytest.mark.parametrize(
    ('code', 'given', 'expected'),
    [
        (0, {}, ['finish(True)']),
        # Another number of stages could not load the dense checkpoint of an elastic job.
        (0, {'elastic': 'restart'}, ['part', 'finish(False)']),
        (0, {'elastic': 'restart', 'load': 'another'}, ['part', 'finish(False)']),
        # As at its end without an exit: no launch continues from the last iteration.
        (0, {'elastic': 'restart', 'last_iteration': 7}, ['finish(True)']),
        # The findings of the rerun machine are loaded in any case.
        (16, {'elastic': 'restart'}, ['finish(True)']),
        # It restores no router biases; windows of before have whole iterations.
        (17, {'elastic': 'restart'}, ['finish(False)']),
        (16, {'elastic': 'restart', 'load': 'another'}, ['finish(False)']),
    ],
)
def test_windows_outlive_an_exit_unless_a_dense_checkpoint_replaces_them(
    code: int, given: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _calls(code, monkeypatch, **given) == expected


def test_replacement_does_not_warm_up_compiled_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    def warm_up(tp_size: int | None = None) -> None:
        pytest.fail('survivors wait')

    monkeypatch.setattr(training, 'set_jit_fusion_options', warm_up)
    monkeypatch.setattr(program, 'handovers', lambda reports: [SimpleNamespace(trainer=b'')])
    found = SimpleNamespace(runs=(True, False, False))
    monkeypatch.setattr(program, 'decode_handover', lambda content: found)
    membership, counters = SimpleNamespace(joining=True, reports=[]), SimpleNamespace()
    session: Any = SimpleNamespace(job=SimpleNamespace(membership=membership))
    program._train(lambda: training.set_jit_fusion_options(tp_size=1), counters, session)
    assert (counters.do_train, counters.do_valid) == (True, False)
