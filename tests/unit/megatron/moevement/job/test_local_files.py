# SPDX-License-Identifier: Apache-2.0
"""What a node lacks is named in one line, with flag, path, rank and node."""

import socket
from argparse import Namespace
from pathlib import Path

import pytest

from megatron.moevement.job.local_files import missing_data, refuse_missing
from moevement_ext.config import ConfigurationError


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, 'gethostname', lambda: 'node7')
    monkeypatch.delenv('MOEVEMENT_NODE', raising=False)


def test_a_file_that_all_ranks_read(tmp_path: Path) -> None:
    args = Namespace(rank=3, tokenizer_model=str(tmp_path / 'model'), vocab_file=None)
    with pytest.raises(ConfigurationError) as refused:
        refuse_missing(args)
    path = tmp_path / 'model'
    assert f'--tokenizer-model: {path} is not there for rank 3 on node7' in str(refused.value)
    path.touch()
    refuse_missing(args)


def test_a_name_in_a_hub_is_no_file() -> None:
    refuse_missing(Namespace(rank=0, tokenizer_model='deepseek-ai/DeepSeek-V3'))


@pytest.mark.parametrize('flag', ['data_path', 'train_data_path'])
def test_a_dataset(flag: str, tmp_path: Path) -> None:
    here, there = tmp_path / 'here', tmp_path / 'there'
    for path in ('here.idx', 'here.bin', 'there.idx'):
        (tmp_path / path).touch()
    args = Namespace(rank=3, **{flag: ['0.3', str(here), '0.7', str(there)]})
    assert f'{there}.bin is not there for rank 3 on node7' in str(missing_data(args))
    (tmp_path / 'there.bin').touch()
    assert missing_data(args) is None
    assert missing_data(Namespace(rank=0, **{flag: ['s3://bucket/text']})) is None
    assert missing_data(Namespace(rank=0)) is None
