# SPDX-License-Identifier: Apache-2.0
"""The program: flags that only upstream's program reads, its planned ends and its imports."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.training import training

from megatron.moevement import pretrain_gpt, program
from moevement_ext.config import SparseCheckpointConfig
from tools.lab.trainer_flags import trainer_parser


@pytest.mark.parametrize(('flag', 'fatal'), [('spiky_loss', False), ('nan_in_loss_and_grad', True)])
def test_losses_are_checked_as_asked(
    monkeypatch: pytest.MonkeyPatch, flag: str, fatal: bool
) -> None:
    checks: list[dict[str, Any]] = []

    class Machine:
        def validate_result(self, **check: Any) -> None:
            checks.append(check)

        def is_unexpectedly_large(self, loss: float, threshold: float, context: str) -> bool:
            return loss > threshold

    given = Namespace(check_for_spiky_loss=False, check_for_nan_in_loss_and_grad=False)
    setattr(given, f'check_for_{flag}', True)
    monkeypatch.setattr(pretrain_gpt, 'get_args', lambda: given)
    monkeypatch.setattr(pretrain_gpt, 'get_rerun_state_machine', Machine)
    wrong = torch.tensor([[float('nan') if fatal else 11.0]])
    pretrain_gpt.loss_func(torch.ones(1, 1), wrong)
    assert any(check['rejection_func'](check['result']) for check in checks)
    assert {check['fatal'] for check in checks} == {fatal}


@pytest.mark.parametrize(
    ('layout', 'read'),
    [('Et|tt|m|L', {0, 2, 3}), ('Et|t|t|mL', {0, 3}), (None, {0, 3})],
)
def test_stage_of_prediction_layers_reads_data(
    monkeypatch: pytest.MonkeyPatch, layout: str | None, read: set[int]
) -> None:
    args = Namespace(
        pipeline_model_parallel_layout=layout,
        pipeline_model_parallel_size=4,
        mtp_num_layers=1,
        create_attention_mask_in_dataloader=True,
        context_parallel_size=1,
        micro_batch_size=1,
        seq_length=2,
    )
    monkeypatch.setattr(pretrain_gpt, 'get_args', lambda: args)
    for spread in ('get_batch_on_this_tp_rank', 'get_batch_on_this_cp_rank'):
        monkeypatch.setattr(pretrain_gpt, spread, lambda batch, **_: batch)
    for group in ('tensor_model', 'context'):
        monkeypatch.setattr(parallel_state, f'get_{group}_parallel_group', lambda: None)
    monkeypatch.setattr(parallel_state, 'get_tensor_model_parallel_rank', lambda: 0)
    monkeypatch.setattr(parallel_state, 'get_tensor_model_parallel_src_rank', lambda: 0)
    monkeypatch.setattr(parallel_state, 'get_pipeline_model_parallel_world_size', lambda: 4)
    for stage in range(4):
        monkeypatch.setattr(
            parallel_state, 'get_pipeline_model_parallel_rank', lambda stage=stage: stage
        )
        batch = pretrain_gpt.get_batch(iter([{'tokens': torch.ones(1, 2)}]), None)
        assert (batch['tokens'] is not None) is (stage in read)


def test_flags_of_the_data_cache_are_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = tmp_path / 'lengths.json'
    lengths.write_text('{"text": [3, 2]}', 'utf-8')
    flags = f'--per-dataset-sequences-path {lengths} --data-cache-path {tmp_path}'
    flags += ' --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap'
    monkeypatch.setattr(pretrain_gpt, 'build_tokenizer', lambda _: SimpleNamespace(vocab_size=100))
    config = pretrain_gpt._dataset_config(trainer_parser().parse_args(flags.split()))
    assert config.fast_cache_load and config.defer_npy_index_mmap
    assert config.sequences_per_dataset == {'text': [3, 2]}


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


ROOT = Path(__file__).resolve().parents[4]
IMPORTED = """
import gc, runpy, sys
runpy.run_path('pretrain_gpt.py', run_name=sys.argv[1])
print(*{'torch', 'megatron.core', 'megatron.training'} & sys.modules.keys())
assert gc.isenabled() and gc.get_freeze_count() > 100_000
"""


def imported_by(name: str) -> set[str]:
    command = [sys.executable, '-W', 'ignore', '-c', IMPORTED, name]
    return set(subprocess.check_output(command, cwd=ROOT, text=True).split())


@pytest.mark.parametrize(
    ('name', 'imported'),
    [
        ('__mp_main__', {'torch'}),  # a process of multiprocessing: every dense save starts one
        ('pretrain_gpt', {'torch', 'megatron.core', 'megatron.training'}),
    ],
)
def test_only_training_processes_import_megatron(name: str, imported: set[str]) -> None:
    assert imported_by(name) == imported
