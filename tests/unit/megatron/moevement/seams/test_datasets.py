# SPDX-License-Identifier: Apache-2.0
"""Upstream's datasets in a process without a usable cache, or that first reads another sample."""

import subprocess
import sys
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets import utils
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

from megatron.moevement.seams import datasets

ROOT = Path(__file__).resolve().parents[5]
PAD = 7
SAMPLES = 24
ORDER = list(range(SAMPLES))


class Tokenizer:
    eod, pad, vocab_size = 0, PAD, None
    unique_identifiers = {'class': 'none'}  # noqa: RUF012


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., GPTDataset]:
    """Open a dataset of 20 documents as a new process does; some samples have padding."""
    prefix = str(tmp_path / 'text')
    builder = IndexedDatasetBuilder(f'{prefix}.bin', dtype=np.int32)
    for length in range(20, 40):
        builder.add_document(torch.arange(length), [length])
    builder.finalize(f'{prefix}.idx')

    def make(cache: Path = tmp_path / 'cache') -> GPTDataset:
        config = GPTDatasetConfig(
            random_seed=1,
            sequence_length=16,
            blend=([prefix], None),
            split='1',
            path_to_cache=str(cache),
            tokenizer=Tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
        )
        documents = np.arange(20, dtype=np.int32)
        return GPTDataset(IndexedDataset(prefix), prefix, documents, SAMPLES, Split.train, config)

    return make


@pytest.fixture
def built(
    opened: Callable[..., GPTDataset], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[list[int]]]:
    """Build the dataset as a given rank; return its samples."""
    name = '_build_document_sample_shuffle_indices'
    original = getattr(GPTDataset, name)
    monkeypatch.setattr(GPTDataset, name, lambda self: datasets.indices(original, self))
    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: True)

    def make(rank: int, **where: Path) -> list[list[int]]:
        monkeypatch.setattr(torch.distributed, 'get_rank', lambda: rank)
        dataset = opened(**where)
        assert dataset.config.path_to_cache
        return [dataset[index]['tokens'].tolist() for index in ORDER]

    return make


def test_rank_without_a_cache_has_the_same_samples(
    built: Callable[..., list[list[int]]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = built(0)
    assert built(3) == expected and 'cannot be used' not in caplog.text
    assert built(3, cache=tmp_path / 'elsewhere') == expected
    assert 'the data cache cannot be used on ' in caplog.text
    assert not (tmp_path / 'elsewhere').exists()


def test_unusable_cache_is_ignored(built: Callable[..., list[list[int]]], tmp_path: Path) -> None:
    """One that is truncated, and one that cannot be written."""
    expected = built(0)
    for path in (tmp_path / 'cache').glob('*.npy'):
        path.write_bytes(path.read_bytes()[:-8])
    (tmp_path / 'file').touch()
    assert built(0) == built(3) == built(0, cache=tmp_path / 'file') == expected


def test_error_that_persists_without_a_cache_is_raised() -> None:
    class Dataset:
        class config:  # noqa: N801
            path_to_cache = 'cache'

    def build(dataset: object) -> None:
        raise OSError(f'no data at {Dataset.config.path_to_cache}')

    with pytest.raises(OSError, match='no data at cache'):
        datasets.indices(build, Dataset)
    assert Dataset.config.path_to_cache == 'cache'


def masks(dataset: GPTDataset, order: list[int]) -> dict[int, list[float]]:
    return {index: dataset[index]['loss_mask'].tolist() for index in order}


def test_loss_masks_do_not_depend_on_the_first_sample_read(
    opened: Callable[[], GPTDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [opened()._query_document_sample_shuffle_indices(index)[0] for index in ORDER]
    expected = {i: (text[1:] != PAD).astype(float).tolist() for i, text in enumerate(texts)}
    padded = [index for index, mask in expected.items() if 0.0 in mask]
    assert 0 < len(padded) < SAMPLES
    assert masks(opened(), [padded[0], *ORDER]) != expected  # else upstream has fixed the defect

    def sample(dataset: GPTDataset, read: Callable[..., object], index: int | None) -> object:
        return datasets.sample(read, dataset, index)

    monkeypatch.setattr(GPTDataset, '__getitem__', partialmethod(sample, GPTDataset.__getitem__))
    for first in padded:
        assert masks(opened(), [first, *ORDER]) == expected
    dataset = opened()
    assert not dataset[None]['loss_mask'].any()  # a sample that only pads a batch
    assert masks(dataset, ORDER) == expected


START = """
import torch
torch.cuda.is_available = lambda: {gpu}
from megatron.moevement import pretrain_gpt
from megatron.core.datasets.utils import compile_helpers
compile_helpers()
print('started')
"""


@pytest.mark.parametrize('gpu', [pytest.param(False, marks=pytest.mark.thorough), True])
def test_program_compiles_no_helpers_on_any_device(gpu: bool) -> None:
    code = START.format(gpu=gpu)
    started = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT)
    assert started.returncode == 0, started.stderr
    assert started.stdout.endswith('started\n')


def test_missing_helpers_are_left_to_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    upstreams = utils.compile_helpers
    monkeypatch.setattr(utils, 'compile_helpers', upstreams)  # restored at the end
    monkeypatch.setitem(sys.modules, 'megatron.core.datasets.helpers_cpp', None)
    datasets.use_compiled()
    assert utils.compile_helpers is upstreams
