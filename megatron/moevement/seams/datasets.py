# SPDX-License-Identifier: Apache-2.0
"""Repairs of upstream's datasets, for processes that start while others train.

- *Sample indices*: rank 0 caches them in files at start, and all other ranks read these. A
  replacement of another rank finds no cache on a node that never had rank 0, and a truncated one
  where rank 0 died. A rank that cannot use the cache builds the indices in memory: they depend on
  data and seed only.
- *Loss masks*: upstream keeps the mask of a dataset's first sample for all later ones, and blanks
  the padding of that first sample in the kept mask itself. A process that first reads another
  sample (a replacement, or a worker of a reopened loader) would train on other tokens. The kept
  mask is full instead; each sample blanks its own padding in a copy, as upstream's code intends.
- *Compiled helpers*: at start, rank 0 runs `make` in megatron/core/datasets and exits if that
  fails. The wheel has the compiled helpers there, but no Makefile.
"""

import importlib
from collections.abc import Callable
from contextlib import suppress

import torch
from megatron.core.datasets.gpt_dataset import GPTDataset

from megatron.moevement.seams import patches
from moevement_ext.config import node_name
from moevement_ext.logger import logger_of

logger = logger_of(__name__)

_PARTS = (
    'megatron.core.datasets.gpt_dataset:GPTDataset._build_document_sample_shuffle_indices',
    'megatron.core.datasets.blended_dataset:BlendedDataset._build_indices',
)
_UNREADABLE = (OSError, EOFError, ValueError)


def install() -> None:
    """Wrap upstream's datasets, for the lifetime of the process and of its loaders' workers."""
    for part in _PARTS:
        patches.wrap(part, indices)
    patches.wrap('megatron.core.datasets.gpt_dataset:GPTDataset.__getitem__', sample)


def indices(build: Callable[..., object], dataset: GPTDataset) -> object:
    """Build the sample indices of a dataset, without the cache if it is unusable. Any thread.

    Raises:
        OSError: building in memory failed as well; the error is that of the cache.
    """
    try:
        return build(dataset)
    except _UNREADABLE as error:
        cache = dataset.config.path_to_cache
        logger.warning(
            'the data cache cannot be used on %s (%s); sample indices are built in memory, which '
            'takes longer',
            node_name(),
            error,
        )
        dataset.config.path_to_cache = ''
        try:
            return build(dataset)
        except Exception:
            raise error from None
        finally:
            dataset.config.path_to_cache = cache


def sample(read: Callable[..., object], dataset: GPTDataset, index: int | None) -> object:
    """Read a sample; keep a full loss mask if it is the first one. Any thread or process."""
    known = dataset.masks_and_position_ids_are_cached
    result = read(dataset, index)
    if not known and dataset.masks_and_position_ids_are_cached:
        dataset.cached_loss_mask = torch.ones_like(dataset.cached_loss_mask)
    return result


def use_compiled() -> None:
    """Skip upstream's compilation where the compiled helpers exist.

    Call after megatron imports, before `initialize_megatron`. In a source tree without compiled
    helpers, upstream's own compilation stays.
    """
    with suppress(ImportError):
        importlib.import_module('megatron.core.datasets.helpers_cpp')
        patches.wrap('megatron.core.datasets.utils:compile_helpers', lambda original: None)
