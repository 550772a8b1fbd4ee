# SPDX-License-Identifier: Apache-2.0
"""Interface to the trainer's state: slices to capture, and loading of captured slots."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch

from moevement_ext.capture.layout import OperatorSlices
from moevement_ext.memory.mapped import Bytes
from moevement_ext.memory.window.slot import SlotContext, SlotHeader


class Operators(Protocol):
    """The training state of this rank, operator by operator."""

    @property
    def slices(self) -> Mapping[str, OperatorSlices]: ...

    @property
    def kinds(self) -> Mapping[str, str]:
        """Kind by operator: 'expert' if ordered by load; any other word otherwise."""

    @property
    def tied(self) -> Sequence[str]:
        """Operators whose weights the first and last stage share."""

    @property
    def device(self) -> torch.device: ...

    def renew(self) -> None:
        """Look up all tensors again, after a checkpoint was loaded, which may replace them."""

    def check(self, header: SlotHeader) -> None:
        """Refuse the records of a slot of another model, with a `RefusedWindow`."""

    def load(self, header: SlotHeader, payload: Bytes, context: SlotContext) -> None:
        """Load a verified slot into the model. Collective over the ranks of the stage."""

    def freeze(self, names: Collection[str]) -> None:
        """Freeze exactly these: forward and input gradient, but no weight gradient, no update."""

    def copy(self, source: int) -> None:
        """Copy the state of rank `source`. Collective over the ranks with the same state."""
