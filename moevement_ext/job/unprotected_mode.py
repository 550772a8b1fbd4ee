# SPDX-License-Identifier: Apache-2.0
"""A job whose host memory could not be set up: training goes on without protection."""

from collections.abc import Callable
from typing import Any

from moevement_ext.recover.trainer import Trainer


class UnprotectedMode:
    """Runs iterations and nothing else. Training thread only.

    Args:
        trainer: the training loop of this rank.
    """

    recovering = False

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def train(self, run: Callable[[], Any]) -> Any:
        """The training loop."""
        return run()

    def step(self, iteration: int) -> Any:
        """The iteration after `iteration`."""
        return self._trainer.iterate(iteration)

    def failed(self, error: Exception) -> None:
        """Whatever it was, it is not mended here."""
