# SPDX-License-Identifier: Apache-2.0
"""Verifies a recovery: compares the recomputed state with earlier captures.

The windows newer than the one a recovery starts from are of no use for it, but their slots carry
checksums of the very state that the replay passes through. Equal checksums say that it was exact;
different ones that something computes other bits than before: nondeterministic kernels, or a chip
that corrupts. Costs nothing before a failure.

Captures lag behind: when the newest iterations are replayed no slot is left to compare them with,
and one slot does not hold all operators. So the loss of each replayed iteration, and where all
ranks reduce it anew the gradient norm, are compared with what the ledger has of it, which was
written as the iteration was committed.

What is in every slot (`OperatorSlices.always`) is not compared: a slot has it as an evaluation left
it, and a replay comes to its state before that.
"""

import logging
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

import torch
import xxhash

from moevement_ext.capture.layout import OperatorSlices, TensorSlice
from moevement_ext.config import STOP
from moevement_ext.memory.dtypes import dtype_name
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.window.slot import Record, SlotHeader, older_experts

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
    """Operators whose state was not what it had been, and scalars that came out otherwise; with
    the iteration that first showed it."""
    iterations: int = 0
    """Iterations of which a scalar was compared."""
    tokens_lost: float | None = None
    """Tokens that experts have learned from in vain; None: the strategy loses none."""

    def __str__(self) -> str:
        compared = []
        if self.verified:
            compared.append(f'{self.verified} operators at iteration {self.verified_at}')
        if self.iterations:
            compared.append(f'loss or gradient norm of {self.iterations} iterations')
        if not compared:
            return 'verified: checksums of the window (it is the newest that was captured)'
        names = _listed(self.differing)
        return f'verified: {", ".join(compared)}, differing: {len(self.differing)}' + (
            f' ({names})' if names else ''
        )


class Verification:
    """Compares recomputed states of one rank with captured ones. Training thread only.

    Args:
        captured: slots that were sealed before the failure.
        operators: what this rank captures of each operator.
        recorded: what the ledger had of the iterations before they are replayed; without the norms
            where the replay is given them.

    Attributes:
        tokens_lost: as of `Verified`.
    """

    def __init__(
        self,
        captured: Iterable[SlotHeader],
        operators: Mapping[str, OperatorSlices],
        recorded: Iterable[LedgerEntry] = (),
    ) -> None:
        self._sources = {
            _key_of_slice(item): item.source
            for slices in operators.values()
            for item in (*slices.full, *slices.weights)
        }
        self._expected: dict[int, dict[_Key, int]] = {}
        for header in captured:
            checksums = self._expected.setdefault(header.iteration, {})
            older = older_experts(header)
            checksums.update(
                (_key_of_record(item), item.checksum)
                for item in header.records
                if item.operator not in older
            )
        self._recorded = {entry.iteration: entry for entry in recorded if entry.judges}
        self._scalars_of: set[int] = set()
        self._compared: set[str] = set()
        self._iteration = -1
        self.tokens_lost: float | None = None
        self._differing: dict[str, int] = {}

    @classmethod
    def of_nothing(cls) -> Self:
        """With nothing to compare with."""
        return cls((), {})

    def replayed(self, iteration: int, loss: float | None) -> None:
        """`iteration` is replayed in a conversion, which is given all other scalars."""
        recorded = self._recorded.pop(iteration, None)
        if recorded is not None:
            self._compare('loss', iteration, recorded.loss, loss)

    def check(self, iteration: int, entry: LedgerEntry | None = None) -> None:
        """The state after `iteration` is recomputed, and nothing writes it now.

        Args:
            iteration: the newest of this rank.
            entry: what was recorded of it just now, if it was run as in training.
        """
        recorded = self._recorded.pop(iteration, None)
        if recorded is not None and entry is not None:
            self._compare('loss', iteration, recorded.loss, entry.loss)
            for before, now in zip(recorded.grad_norms, entry.grad_norms, strict=False):
                self._compare('gradient norm', iteration, before, now)
        self._check_state(iteration)

    def _compare(self, what: str, iteration: int, before: float | None, now: float | None) -> None:
        """Bit for bit: what is no number equals itself, too."""
        if before is None or now is None:
            return
        self._scalars_of.add(iteration)
        if struct.pack('d', before) != struct.pack('d', now) and what not in self._differing:
            self._differing[what] = iteration
            logger.warning(
                'sparse checkpointing: the %s of iteration %d is %.9g, and had been %.9g',
                what,
                iteration,
                now,
                before,
            )

    def _check_state(self, iteration: int) -> None:
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
        """True if the recovered state differs, and `--sparse-ckpt-verify` demands to stop."""
        return verify == STOP and bool(self._differing)

    def result(self) -> Verified:
        """What was found so far."""
        names = [f'{name} from iteration {first}' for name, first in self._differing.items()]
        return Verified(
            len(self._compared),
            self._iteration,
            tuple(sorted(names)),
            len(self._scalars_of),
            self.tokens_lost,
        )


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
