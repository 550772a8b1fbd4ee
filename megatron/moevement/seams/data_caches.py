# SPDX-License-Identifier: Apache-2.0
"""Sample indices on ranks where upstream's cache of them is missing or damaged.

Rank 0 builds the cache at start, and all other ranks read it. A replacement of another rank finds
no cache on a node that never had rank 0, and a truncated one where rank 0 died. A rank that cannot
read or write the cache builds the indices in memory: they depend on data and seed only.
"""

from collections.abc import Callable

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
_NO_CACHE = ''


def install() -> None:
    """Make datasets work without a usable cache, for the lifetime of the process."""
    for part in _PARTS:
        patches.wrap(part, indices)


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
        dataset.config.path_to_cache = _NO_CACHE
        try:
            return build(dataset)
        except Exception:
            raise error from None
        finally:
            dataset.config.path_to_cache = cache
