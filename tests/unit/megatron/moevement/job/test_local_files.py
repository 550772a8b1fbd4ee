# SPDX-License-Identifier: Apache-2.0
"""A file missing on a node is named in one line, with flag, path, rank and node."""

import socket
from pathlib import Path

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.moevement.job.named_files import empty_part, missing_data, refuse_missing
from moevement_ext.config import ConfigurationError


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, 'gethostname', lambda: 'node7')
    monkeypatch.delenv('MOEVEMENT_NODE', raising=False)


def test_missing_file_is_named(tmp_path: Path) -> None:
    settings = {'tokenizer_model': str(tmp_path / 'model'), 'vocab_file': None}
    with pytest.raises(ConfigurationError) as refused:
        refuse_missing(settings, rank=3)
    path = tmp_path / 'model'
    assert f'--tokenizer-model: {path} does not exist for rank 3 on node7' in str(refused.value)
    assert str(refused.value).endswith('correct the path, or mount or copy the file to that node.')
    path.touch()
    refuse_missing(settings, rank=3)


def test_name_in_a_model_hub_is_not_checked() -> None:
    refuse_missing({'tokenizer_model': 'deepseek-ai/DeepSeek-V3'}, rank=0)


@pytest.mark.parametrize('flag', ['data_path', 'train_data_path'])
def test_missing_dataset_file_is_named(flag: str, tmp_path: Path) -> None:
    here, there = tmp_path / 'here', tmp_path / 'there'
    for path in ('here.idx', 'here.bin', 'there.idx'):
        (tmp_path / path).touch()
    settings = {flag: ['0.3', str(here), '0.7', str(there)]}
    assert f'{there}.bin does not exist for rank 3 on node7' in str(missing_data(settings, rank=3))
    (tmp_path / 'there.bin').touch()
    assert missing_data(settings, rank=3) is None
    assert missing_data({flag: ['s3://bucket/text']}, rank=0) is None
    assert missing_data({}, rank=0) is None


@pytest.mark.parametrize(
    ('split', 'documents', 'empty'),
    [
        ('969,30,1', 4, True),
        ('969,30,1', 500, True),  # the test part begins at 499.5, which is rounded to 500
        ('969,30,1', 501, False),
        ('100,0,0', 1, False),
        ('1,1,1', 2, True),  # it ends where it begins, at 1
        ('1,1,1', 3, False),
        ('1,1,0', 1, True),
    ],
)
@pytest.mark.parametrize('flag', ['data_path', 'train_data_path'])
def test_split_that_leaves_a_part_empty_is_named(
    split: str, documents: int, empty: bool, flag: str, tmp_path: Path
) -> None:
    prefix = str(tmp_path / 'text')
    builder = IndexedDatasetBuilder(f'{prefix}.bin', dtype=numpy.uint16)
    for _ in range(documents):
        builder.add_document(torch.tensor([1, 2]), [2])
    builder.finalize(f'{prefix}.idx')
    found = empty_part({flag: [prefix], 'split': split, 'sft': False})
    begin = f'--split {split}: a part of it gets none of the {documents} sequences of {prefix}; '
    assert str(found).startswith(begin) is (empty and flag == 'data_path'), found
    assert empty_part({flag: [prefix], 'split': split, 'sft': True}) is None
