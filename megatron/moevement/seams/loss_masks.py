# SPDX-License-Identifier: Apache-2.0
"""Loss masks that do not depend on which sample a process has read first.

Upstream keeps the loss mask of a dataset's first sample for all later ones, and blanks the padding
tokens of that first sample in the kept mask itself. A process that first reads another sample (a
replacement, or a worker of a reopened loader) would train on other tokens. The kept mask is full
instead; each sample blanks its own padding in a copy, as upstream's code intends.
"""

from collections.abc import Callable

import torch
from megatron.core.datasets.gpt_dataset import GPTDataset

from megatron.moevement.seams import patches


def install() -> None:
    """Wrap upstream's datasets, for the lifetime of the process and of its loaders' workers."""
    patches.wrap('megatron.core.datasets.gpt_dataset:GPTDataset.__getitem__', sample)


def sample(read: Callable[..., object], dataset: GPTDataset, index: int | None) -> object:
    """Read a sample; keep a full loss mask if it is the first one. Any thread or process."""
    known = dataset.masks_and_position_ids_are_cached
    result = read(dataset, index)
    if not known and dataset.masks_and_position_ids_are_cached:
        dataset.cached_loss_mask = torch.ones_like(dataset.cached_loss_mask)
    return result
