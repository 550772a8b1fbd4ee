# SPDX-License-Identifier: Apache-2.0
"""Indices of samples, where the cache that upstream has them in is not there, or not whole.

Rank 0 builds a cache at a start, and all others read it. A replacement of another rank finds none
on a node that no rank 0 has been on, and one that was cut off where rank 0 died. Who cannot read,
or write, the cache builds what it needs in memory: it follows from the data and the seed alone.

Checked against megatron-core 0.19.2.
"""

import logging
from collections.abc import Callable

from megatron.core.datasets.gpt_dataset import GPTDataset

from megatron.moevement.seams import patches
from moevement_ext.config import node_name

logger = logging.getLogger(__name__)

_PARTS = (
    'megatron.core.datasets.gpt_dataset:GPTDataset._build_document_sample_shuffle_indices',
    'megatron.core.datasets.blended_dataset:BlendedDataset._build_indices',
)
_UNREADABLE = (OSError, EOFError, ValueError)
_NO_CACHE = ''


def install() -> None:
    """Have datasets do without a cache that cannot be used, for the life of the process."""
    for part in _PARTS:
        patches.wrap(part, indices)


def indices(build: Callable[..., object], dataset: GPTDataset) -> object:
    """Those of a dataset, from the cache if that is of use; on the thread that makes the dataset.

    Raises:
        OSError: it cannot be done without the cache either; what was wrong with that.
    """
    try:
        return build(dataset)
    except _UNREADABLE as error:
        cache = dataset.config.path_to_cache
        logger.warning(
            'sparse checkpointing: the data cache cannot be used on %s (%s); indices of samples '
            'are built in memory, and take longer',
            node_name(),
            error,
        )
        dataset.config.path_to_cache = _NO_CACHE
        try:
            return build(dataset)
        except Exception:
            raise error from None
        finally:
            dataset.config.path_to_cache = cache
