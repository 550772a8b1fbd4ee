# SPDX-License-Identifier: Apache-2.0
"""A recovery that verifies itself: what a replay recomputes, against what was captured before.

The windows newer than the one a recovery starts from are of no use for it, but their slots carry
checksums of the very state that the replay passes through. Equal checksums say that it was exact;
different ones that something computes other bits than before: nondeterministic kernels, or a chip
that corrupts. Costs nothing before a failure.

What is in every slot (`OperatorSlices.always`) is not compared: a slot has it as an evaluation left
it, and a replay comes to its state before that.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

import torch
import xxhash

from moevement_ext.capture.layout import OperatorSlices, TensorSlice
from moevement_ext.config import STOP
from moevement_ext.memory.dtypes import dtype_name
from moevement_ext.memory.window.slot import Record, SlotHeader

logger = logging.getLogger(__name__)

_MOST_NAMES = 8


class _Key(NamedTuple):
    """What makes two captured ranges comparable."""

    operator: str
    tensor: str
    part: str
    dtype: str
    start: int
    end: int


class Verified(NamedTuple):
    """The outcome for one rank."""

    verified: int
    """Operators that were compared, in full or by their compute weights."""
    verified_at: int
    """The last iteration at which that was possible, -1 if there was none."""
    differing: tuple[str, ...]
    """Operators whose state was not what it had been; with the iteration that first showed it."""

    def __str__(self) -> str:
        if not self.verified:
            return 'verified: checksums of the window (it is the newest that was captured)'
        names = _listed(self.differing)
        return (
            f'verified: {self.verified} operators at iteration {self.verified_at}, '
            f'differing: {len(self.differing)}' + (f' ({names})' if names else '')
        )


class Verification:
    """Compares recomputed states of one rank with captured ones. Training thread only.

    Args:
        captured: slots that were sealed before the failure.
        operators: what this rank captures of each operator.
    """

    def __init__(
        self, captured: Iterable[SlotHeader], operators: Mapping[str, OperatorSlices]
    ) -> None:
        self._sources = {
            _key_of_slice(item): item.source
            for slices in operators.values()
            for item in (*slices.full, *slices.light)
        }
        self._expected: dict[int, dict[_Key, int]] = {}
        for header in captured:
            checksums = self._expected.setdefault(header.iteration, {})
            checksums.update((_key_of_record(item), item.checksum) for item in header.records)
        self._compared: set[str] = set()
        self._iteration = -1
        self._differing: dict[str, int] = {}

    @classmethod
    def of_nothing(cls) -> Self:
        """With nothing to compare with."""
        return cls((), {})

    def check(self, iteration: int) -> None:
        """The state after `iteration` is recomputed, and nothing writes it now."""
        expected = self._expected.pop(iteration, None)
        if expected is None:
            return
        for key, checksum in expected.items():
            source = self._sources.get(key)
            if source is None:
                continue
            self._compared.add(key.operator)
            self._iteration = iteration
            if _checksum(source) != checksum:
                self._differing.setdefault(key.operator, iteration)
        new = [name for name, first in self._differing.items() if first == iteration]
        if new:  # said at once: another failure may come before the end of this recovery
            logger.warning(
                'sparse checkpointing: the state after iteration %d is not what it had been: %s',
                iteration,
                _listed(new),
            )

    def forbids(self, verify: str) -> bool:
        """What was recovered differs, and `--sparse-ckpt-verify` is to stop then."""
        return verify == STOP and bool(self._differing)

    def result(self) -> Verified:
        """What was found so far."""
        names = [f'{name} from iteration {first}' for name, first in self._differing.items()]
        return Verified(len(self._compared), self._iteration, tuple(sorted(names)))


def _listed(names: Sequence[str]) -> str:
    return ', '.join(names[:_MOST_NAMES]) + (', ...' if len(names) > _MOST_NAMES else '')


def _key_of_record(record: Record) -> _Key:
    return _Key(record.operator, record.tensor, record.part, record.dtype, record.start, record.end)


def _key_of_slice(item: TensorSlice) -> _Key:
    dtype = dtype_name(item.source.dtype)
    return _Key(item.operator, item.tensor, item.part, dtype, item.start, item.end)


def _checksum(source: torch.Tensor) -> int:
    content = source.detach().cpu().contiguous().view(torch.uint8)
    return xxhash.xxh3_64_intdigest(memoryview(content.numpy()))
