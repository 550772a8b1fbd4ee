# SPDX-License-Identifier: Apache-2.0
"""A file missing on a node is named in one line, with flag, path, rank and node."""

import socket
from pathlib import Path

import pytest

from megatron.moevement.job.local_files import missing_data, refuse_missing
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
