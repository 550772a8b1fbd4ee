# SPDX-License-Identifier: Apache-2.0
"""Moves data iterators to any position, forward or backward.

For upstream's trainer `UpstreamData` wraps `build_pretraining_data_loader`, to record the datasets:
a loader created again with another number of consumed samples continues exactly there. Upstream
calls it for training, validation (maybe several sets) and test data in this order, within
`build_train_valid_test_data_iterators`, which runs once per virtual pipeline chunk.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import megatron.training.training as training
from megatron.core.rerun_state_machine import RerunDataIterator
from torch.utils.data import DataLoader

from megatron.moevement.seams import patches
from moevement_ext.capture.trainer_state import capture_generators, restore_generators

_KINDS = ('training', 'validation', 'test')


class DataPosition(Protocol):
    """Moves this rank's iterators to a position, in samples of all ranks. Training thread."""

    def move_training(self, consumed_samples: int) -> None: ...

    def move_validation(self, consumed_samples: int) -> None: ...


_Loader = Callable[..., DataLoader[object]]
_OpenAt = Callable[[int], Iterable[object]]


class UpstreamData:
    """Records the datasets behind the iterators of upstream's trainer.

    Args:
        cyclic: upstream reads its loaders repeatedly (`--dataloader-type cyclic`).
        full_validation: each evaluation reads all validation data (`--full-validation`).
    """

    def __init__(self, cyclic: bool, full_validation: bool) -> None:
        self._cyclic = cyclic
        self._full_validation = full_validation
        self._iterators: dict[str, object] = {}
        self._loaders: dict[str, list[_OpenAt]] = {kind: [] for kind in _KINDS}
        self._calls = 0

    def install(self) -> None:
        """Wrap upstream's functions, for the lifetime of the process."""
        trainer = 'megatron.training.training'
        patches.wrap(f'{trainer}:build_train_valid_test_data_iterators', self._building)
        patches.wrap(f'{trainer}:build_pretraining_data_loader', self._noting)

    def use(self, training_iterators: object, validation_iterators: object) -> None:
        """Set the iterators that upstream's loop reads; one each, or one per model chunk."""
        self._iterators = {'training': training_iterators, 'validation': validation_iterators}

    def move_training(self, consumed_samples: int) -> None:
        self._move('training', consumed_samples)

    def move_validation(self, consumed_samples: int) -> None:
        # With full validation they restart in each evaluation, as upstream's own iterators do.
        if not self._full_validation:
            self._move('validation', consumed_samples)

    def _building(self, build: Callable[..., object], provider: object) -> object:
        self._calls = 0
        return build(provider)

    def _noting(self, build: _Loader, dataset: object, consumed_samples: int) -> DataLoader[object]:
        # Of several validation sets, only the first is recorded as validation; such sets never
        # move.
        kind = _KINDS[min(self._calls, len(_KINDS) - 1)]
        self._calls += 1
        self._loaders[kind].append(partial(self._loader_at, build, dataset))
        return build(dataset, consumed_samples)

    def _loader_at(
        self, build: _Loader, dataset: object, consumed_samples: int
    ) -> Iterable[object]:
        """Loader from `consumed_samples` on; empty at the end, where upstream opens none.

        A blend has no more samples than training reads, and a failure may follow the last
        iteration.
        """
        if not self._cyclic and isinstance(dataset, Sized) and consumed_samples >= len(dataset):
            return ()
        return build(dataset, consumed_samples)

    def _move(self, kind: str, consumed_samples: int) -> None:
        """Create the loaders again; all generators keep their states, whatever the loaders draw."""
        iterators = self._iterators[kind]
        chunks = iterators if isinstance(iterators, Sequence) else [iterators]
        with generators_unmoved():
            for loader, iterator in zip(self._loaders[kind], chunks, strict=True):
                if isinstance(iterator, RerunDataIterator):
                    iterator.advance()  # drop the micro-batches of the interrupted iteration
                    iterator.iterable = self._opened(loader(consumed_samples), consumed_samples)

    def _opened(self, loader: Iterable[object], consumed_samples: int) -> Iterator[object]:
        """Iterator from `consumed_samples` on, which draws random numbers when upstream's would.

        A loader draws a seed when it is opened. A cyclic loader is opened when the first sample of
        an epoch is read; one whose processes persist only in the first epoch.
        """
        if not self._cyclic:
            return iter(loader)
        again_and_again = training.cyclic_iter(loader)
        assert isinstance(loader, DataLoader)
        sampler: Any = loader.batch_sampler
        of_epoch = sampler.total_samples - sampler.last_batch_size
        if consumed_samples % of_epoch == 0 and not (
            consumed_samples and loader.persistent_workers
        ):
            return iter(again_and_again)
        return itertools.chain(iter(loader), again_and_again)


@contextmanager
def generators_unmoved() -> Iterator[None]:
    """Restore the host's global generators at the end of a context that may draw data."""
    states = capture_generators(on_device=False)
    try:
        yield
    finally:
        restore_generators(states)
