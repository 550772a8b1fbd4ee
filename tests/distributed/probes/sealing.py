# SPDX-License-Identifier: Apache-2.0
"""Workers that die when all that they have captured is sealed.

What the replay of such a worker can be compared with does not depend then on how busy the machine
was when it died.
"""

from typing import Any

from moevement_ext import faults
from moevement_ext.protect.checkpointer import SparseCheckpointer


def seal_before_death() -> None:
    """In a worker: captures arrive before an iteration in which it dies goes on."""
    begin = SparseCheckpointer.begin

    def begin_and_seal(checkpointer: SparseCheckpointer, iteration: int, *given: Any) -> None:
        begin(checkpointer, iteration, *given)
        if any(fault.iteration == iteration + 1 for fault in faults._armed):
            checkpointer.drain()

    SparseCheckpointer.begin = begin_and_seal  # type: ignore[method-assign]
