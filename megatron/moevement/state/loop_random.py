# SPDX-License-Identifier: Apache-2.0
"""Separates the random numbers that a custom loop draws between steps from those of training.

A stage that replays repeats only the steps, and a failure may interrupt the code between them. So
draws there (by an evaluation, by opening a loader, by generated samples) must not affect training.
The loop has a separate stream, which starts as a copy of training's.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.moevement.state.iteration_state import (
    RngState,
    capture_rng,
    restore_rng,
    rng_kept,
)


class LoopRandom:
    """Switches the generators between training (in a step) and the loop. Training thread only.

    A loop that draws nothing costs two captures of the generators per step.
    """

    def __init__(self) -> None:
        self._training: RngState | None = None
        self._loop: RngState | None = None

    def begin(self) -> None:
        """Begin training with the present generator states."""
        self._training = capture_rng()

    def end(self) -> None:
        """End training; later code continues with training's generators."""
        self._to_training()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Use training's generators within a step; after an error, recovery must restore them."""
        self._to_training()
        self._training = None
        yield
        self._training = capture_rng()
        if self._loop is not None:
            restore_rng(self._loop)

    @contextmanager
    def of_training(self) -> Iterator[None]:
        """Use training's generators within the context, between two steps."""
        with rng_kept():
            if self._training is not None:
                restore_rng(self._training)
            yield

    def _to_training(self) -> None:
        if self._training is None:
            return
        now = capture_rng()
        if now != self._training:
            self._loop = now
            restore_rng(self._training)
