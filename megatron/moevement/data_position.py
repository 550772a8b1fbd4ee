# SPDX-License-Identifier: Apache-2.0
"""Moves upstream's data iterators to any position, back or forth.

Stands around `build_pretraining_data_loader`, to know the datasets: a loader made again with other
consumed samples continues exactly there. Upstream calls it for training, validation and test data
in this order, once more for every virtual pipeline chunk.

Checked against megatron-core 0.19.2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import megatron.training.training as training
import torch
from megatron.core.rerun_state_machine import RerunDataIterator

_KINDS = ('training', 'validation', 'test')


class DataPosition:
    """Knows the datasets behind the iterators of this rank. Training thread only."""

    def __init__(self) -> None:
        self._datasets: dict[str, list[Any]] = {kind: [] for kind in _KINDS}
        self._calls = 0
        self._build = training.build_pretraining_data_loader

    def install(self) -> None:
        """Take the place of upstream's function, for the life of the process."""
        training.build_pretraining_data_loader = self._noting

    def move_training(self, iterators: Any, consumed_samples: int) -> None:
        """Have the training iterators go on after `consumed_samples`."""
        self._move('training', iterators, consumed_samples)

    def move_validation(self, iterators: Any, consumed_samples: int) -> None:
        """Have the validation iterators go on after `consumed_samples`."""
        self._move('validation', iterators, consumed_samples)

    def _noting(self, dataset: Any, consumed_samples: int) -> Any:
        kind = _KINDS[self._calls % len(_KINDS)]
        self._calls += 1
        self._datasets[kind].append(dataset)
        return self._build(dataset, consumed_samples)

    def _move(self, kind: str, iterators: Any, consumed_samples: int) -> None:
        """Make loaders anew; they draw seeds from the generator, which must not notice."""
        chunks = iterators if isinstance(iterators, Sequence) else [iterators]
        state = torch.get_rng_state()
        for dataset, iterator in zip(self._datasets[kind], chunks, strict=True):
            if isinstance(iterator, RerunDataIterator):
                iterator.advance()  # forget the micro-batches of the iteration that was cut off
                iterator.iterable = iter(self._endless(self._build(dataset, consumed_samples)))
        torch.set_rng_state(state)

    @staticmethod
    def _endless(loader: Any) -> Any:
        cyclic: Callable[[Any], Any] = training.cyclic_iter
        return cyclic(loader) if training.get_args().dataloader_type == 'cyclic' else loader
