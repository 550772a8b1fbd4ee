# SPDX-License-Identifier: Apache-2.0
"""The program does what upstream's does with flags that only a program reads."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from megatron.moevement import pretrain_gpt
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
