# SPDX-License-Identifier: Apache-2.0
"""Mode of a job that has no host memory and trains without protection."""

from collections.abc import Callable
from typing import Any

from moevement_ext.recover.trainer import Trainer


class UnprotectedMode:
    """Runs only the iterations. Training thread only."""

    recovering = False

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def train(self, run: Callable[[], Any]) -> Any:
        return run()

    def step(self, iteration: int) -> Any:
        return self._trainer.iterate(iteration)

    def failed(self) -> None:
        """Do nothing: this mode cannot recover."""
