# SPDX-License-Identifier: Apache-2.0
"""Verifies a recovery: compares the recomputed state with earlier captures.

Windows newer than the recovery's window cannot be used for the recovery, but their slots contain
checksums of the same states that the replay passes through. Equal checksums show that the replay
was exact. Different checksums show that a computation yields other bits than before:
nondeterministic kernels, or a chip that corrupts data. The check costs nothing before a failure.

Captures lag behind: no slot is left to compare the newest replayed iterations with, and one slot
does not hold all operators. So the loss of each replayed iteration, and the gradient norm where all
ranks reduce it again, are compared with the ledger's entry, which was written at the commit. Each
slot has the loss of its iteration, too: where the ledger was lost with its node, replicas and
copies on disk still have the losses.

Data in every slot (`OperatorSlices.always`) is not compared: a slot contains its state after an
evaluation, and a replay computes its state before it.
"""

import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

import torch
import xxhash

from moevement_ext.capture.layout import OperatorSlices
from moevement_ext.config import STOP
from moevement_ext.errors import some
from moevement_ext.logger import logger_of
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.window.slot import RangeKey, SlotHeader, decode_context, older_experts

logger = logger_of(__name__)


class Verified(NamedTuple):
    """Result of the verification on one rank."""

    verified: int
    """Number of compared operators, in full or by their compute weights."""
    verified_at: int
    """Last iteration with a comparison, -1 without one."""
    differing: tuple[str, ...]
    """Operators and scalars that differ from before, with the iteration of the first
    difference."""
    iterations: int = 0
    """Number of iterations with a compared scalar."""
    tokens_lost: float | None = None
    """Tokens whose learning the experts lost; None unless the strategy is lossy."""

    def __str__(self) -> str:
        compared = []
        if self.verified:
            compared.append(f'{self.verified} operators at iteration {self.verified_at}')
        if self.iterations:
            compared.append(f'loss or gradient norm of {self.iterations} iterations')
        if not compared:
            return 'verified: checksums of the window (it is the newest that was captured)'
        names = some(self.differing)
        return f'verified: {", ".join(compared)}, differing: {len(self.differing)}' + (
            f' ({names})' if names else ''
        )


class Verification:
    """Compares recomputed states of one rank with captured ones. Training thread only.

    `captured` are slots that were sealed before the failure. `recorded` are ledger entries of
    the iterations before their replay, without the norms if the replay takes them from the
    ledger.
    """

    def __init__(
        self,
        captured: Iterable[SlotHeader],
        operators: Mapping[str, OperatorSlices],
        recorded: Iterable[LedgerEntry] = (),
    ) -> None:
        self._sources = {
            item.record().key: item.source
            for slices in operators.values()
            for item in (*slices.full, *slices.weights)
        }
        self._expected: dict[int, dict[RangeKey, int]] = {}
        self._captured_losses: dict[int, float | None] = {}
        for header in captured:
            if header.context:
                self._captured_losses[header.iteration] = decode_context(header.context).loss
            checksums = self._expected.setdefault(header.iteration, {})
            older = older_experts(header)
            checksums.update(
                (item.key, item.checksum) for item in header.records if item.operator not in older
            )
        self._recorded = {entry.iteration: entry for entry in recorded}
        self._compares = True
        self._scalars_of: set[int] = set()
        self._compared: set[str] = set()
        self._iteration = -1
        self.tokens_lost: float | None = None
        self._differing: dict[str, int] = {}

    @classmethod
    def of_nothing(cls) -> Self:
        """Return a verification that compares nothing."""
        nothing = cls((), {})
        nothing._compares = False
        return nothing

    def replayed(self, iteration: int, loss: float | None, captured: float | None = None) -> None:
        """Compare the loss of an iteration replayed in a conversion; other scalars are given.

        `captured` is the loss in the slot after this iteration. Needed where the ledger was lost
        with its node, or has the entry of another rank.
        """
        self._compare_loss(iteration, self._recorded.pop(iteration, None), captured, loss)

    def check(self, iteration: int, entry: LedgerEntry | None = None) -> None:
        """Compare the recomputed state after `iteration`, while no thread writes it.

        `entry` is the ledger entry of the recomputation, if it ran as in training.
        """
        recorded = self._recorded.pop(iteration, None)
        if entry is not None:
            captured = self._captured_losses.get(iteration)
            self._compare_loss(iteration, recorded, captured, entry.loss)
        if recorded is not None and entry is not None:
            for before, now in zip(recorded.grad_norms, entry.grad_norms, strict=False):
                self._compare('gradient norm', iteration, before, now)
        self._check_state(iteration)

    def _compare_loss(
        self,
        iteration: int,
        recorded: LedgerEntry | None,
        captured: float | None,
        now: float | None,
    ) -> None:
        before = captured if recorded is None or recorded.loss is None else recorded.loss
        if self._compares:
            self._compare('loss', iteration, before, now)

    def _compare(self, what: str, iteration: int, before: float | None, now: float | None) -> None:
        """Compare bit for bit; NaN equals itself."""
        if before is None or now is None:
            return
        self._scalars_of.add(iteration)
        if struct.pack('d', before) != struct.pack('d', now) and what not in self._differing:
            self._differing[what] = iteration
            logger.warning(
                'the %s of iteration %d is %.9g, and had been %.9g', what, iteration, now, before
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
        self._report(iteration)

    def _report(self, iteration: int) -> None:
        """Log new differences at once: another failure may precede the end of this recovery."""
        new = [name for name, first in self._differing.items() if first == iteration]
        if new:
            logger.warning(
                'the state after iteration %d is not what it had been: %s', iteration, some(new)
            )

    def forbids(self, verify: str) -> bool:
        """True if the recovered state differs, and `--sparse-ckpt-verify` demands to stop."""
        return verify == STOP and bool(self._differing)

    def result(self) -> Verified:
        names = [f'{name} from iteration {first}' for name, first in self._differing.items()]
        return Verified(
            len(self._compared),
            self._iteration,
            tuple(sorted(names)),
            len(self._scalars_of),
            self.tokens_lost,
        )


def _checksum(source: torch.Tensor) -> int:
    content = source.detach().cpu().contiguous().view(torch.uint8)
    return xxhash.xxh3_64_intdigest(memoryview(content.numpy()))
