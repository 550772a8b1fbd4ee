# SPDX-License-Identifier: Apache-2.0
"""Upstream's datasets on ranks that find no cache, a truncated one, or one they may not write."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.moevement.seams import cpu_device

cpu_device.install()

import torch  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: E402
from megatron.core.datasets.indexed_dataset import (  # noqa: E402
    IndexedDataset,
    IndexedDatasetBuilder,
)
from megatron.core.datasets.utils import Split  # noqa: E402

from megatron.moevement.seams import datasets  # noqa: E402


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """A dataset of 20 documents."""
    builder = IndexedDatasetBuilder(str(tmp_path / 'text.bin'), dtype=np.int32)
    for length in range(20, 40):
        builder.add_document(torch.arange(length), [length])
    builder.finalize(str(tmp_path / 'text.idx'))
    return str(tmp_path / 'text')


@pytest.fixture
def built(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[list[int]]]:
    """Build the dataset as a given rank; return its samples."""
    name = '_build_document_sample_shuffle_indices'
    original = getattr(GPTDataset, name)
    monkeypatch.setattr(GPTDataset, name, lambda self: datasets.indices(original, self))
    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: True)

    def make(rank: int, cache: Path = tmp_path / 'cache') -> list[list[int]]:
        monkeypatch.setattr(torch.distributed, 'get_rank', lambda: rank)
        config = GPTDatasetConfig(
            random_seed=1,
            sequence_length=16,
            blend=([prefix], None),
            split='1',
            path_to_cache=str(cache),
            tokenizer=_Tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
        )
        dataset = GPTDataset(
            IndexedDataset(prefix), prefix, np.arange(20, dtype=np.int32), 30, Split.train, config
        )
        assert config.path_to_cache == str(cache)
        return [dataset[index]['tokens'].tolist() for index in range(30)]

    return make


class _Tokenizer:
    eod, pad, vocab_size = 0, -1, None
    unique_identifiers = {'class': 'none'}  # noqa: RUF012


def test_rank_without_a_cache_has_the_same_samples(
    built: Callable[..., list[list[int]]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = built(rank=0)
    assert built(rank=3) == expected and 'cannot be used' not in caplog.text
    assert built(rank=3, cache=tmp_path / 'elsewhere') == expected
    assert 'the data cache cannot be used on ' in caplog.text
    assert not (tmp_path / 'elsewhere').exists()


def test_truncated_cache_is_ignored(built: Callable[..., list[list[int]]], tmp_path: Path) -> None:
    expected = built(rank=0)
    for path in (tmp_path / 'cache').glob('*.npy'):
        path.write_bytes(path.read_bytes()[:-8])
    assert built(rank=0) == built(rank=3) == expected


def test_rank_that_cannot_write_the_cache_builds_without_it(
    built: Callable[..., list[list[int]]], tmp_path: Path
) -> None:
    (tmp_path / 'file').touch()
    assert built(rank=0, cache=tmp_path / 'file') == built(rank=0)


def test_error_that_persists_without_a_cache_is_raised() -> None:
    class Dataset:
        class config:  # noqa: N801
            path_to_cache = 'cache'

    def build(dataset: object) -> None:
        raise OSError(f'no data at {Dataset.config.path_to_cache}')

    with pytest.raises(OSError, match='no data at cache'):
        datasets.indices(build, Dataset)
    assert Dataset.config.path_to_cache == 'cache'
