# SPDX-License-Identifier: Apache-2.0
"""What a trainer gives to be captured, and how what was captured is put back."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch

from moevement_ext.capture.layout import OperatorSlices
from moevement_ext.memory.mapped import Bytes
from moevement_ext.memory.window.slot import SlotContext, SlotHeader


class Operators(Protocol):
    """The training state of this rank, operator by operator."""

    @property
    def slices(self) -> Mapping[str, OperatorSlices]:
        """What is captured of each operator of this rank."""

    @property
    def kinds(self) -> Mapping[str, str]:
        """'expert' for those that are ordered by their load; any other word for the rest."""

    @property
    def tied(self) -> Sequence[str]:
        """Those whose weights first and last stage share."""

    @property
    def device(self) -> torch.device:
        """Where the state lives."""

    def check(self, header: SlotHeader) -> None:
        """Compare what a slot holds with what this model needs of it.

        Raises:
            RefusedWindow: it is of another model.
        """

    def load(self, header: SlotHeader, payload: Bytes, context: SlotContext) -> None:
        """Put a verified slot into place. Collective over the ranks of the stage."""

    def freeze(self, names: Collection[str]) -> None:
        """Freeze exactly these: forward and input gradient, but no weight gradient, no update."""

    def copy(self, source: int) -> None:
        """Take over the state of rank `source`. Collective over the ranks that hold the same."""
