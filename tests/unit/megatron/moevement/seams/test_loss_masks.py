# SPDX-License-Identifier: Apache-2.0
"""Loss masks of upstream's datasets, where the first sample read affects all later ones."""

from collections.abc import Callable
from functools import partialmethod
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

_PAD = 7
_SAMPLES = 24


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[], GPTDataset]:
    """Open a dataset as a new process does; some samples have padding."""
    builder = IndexedDatasetBuilder(str(tmp_path / 'text.bin'), dtype=np.int32)
    builder.add_document(torch.arange(400) % 41, [400])
    builder.finalize(str(tmp_path / 'text.idx'))
    prefix = str(tmp_path / 'text')

    def make() -> GPTDataset:
        config = GPTDatasetConfig(
            random_seed=1,
            sequence_length=16,
            blend=([prefix], None),
            split='1',
            path_to_cache=str(tmp_path / 'cache'),
            tokenizer=_Tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
        )
        indices = np.arange(1, dtype=np.int32)
        return GPTDataset(IndexedDataset(prefix), prefix, indices, _SAMPLES, Split.train, config)

    return make


class _Tokenizer:
    eod, pad, vocab_size = 0, _PAD, None
    unique_identifiers = {'class': 'none'}  # noqa: RUF012


def _masks(dataset: GPTDataset, order: list[int]) -> dict[int, list[float]]:
    return {index: dataset[index]['loss_mask'].tolist() for index in order}


def test_loss_masks_do_not_depend_on_the_first_sample_read(
    opened: Callable[[], GPTDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = list(range(_SAMPLES))
    texts = [opened()._query_document_sample_shuffle_indices(index)[0] for index in order]
    expected = {i: (text[1:] != _PAD).astype(float).tolist() for i, text in enumerate(texts)}
    padded = [index for index, mask in expected.items() if 0.0 in mask]
    assert 0 < len(padded) < _SAMPLES
    assert _masks(opened(), [padded[0], *order]) != expected  # else upstream has fixed the defect

    read = GPTDataset.__getitem__
    monkeypatch.setattr(GPTDataset, '__getitem__', partialmethod(_sample, read))
    for first in padded:
        assert _masks(opened(), [first, *order]) == expected
    dataset = opened()
    assert not dataset[None]['loss_mask'].any()  # a sample that only pads a batch
    assert _masks(dataset, order) == expected


def _sample(dataset: GPTDataset, read: Callable[..., object], index: int | None) -> object:
    return datasets.sample(read, dataset, index)
