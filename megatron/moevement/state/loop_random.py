# SPDX-License-Identifier: Apache-2.0
"""What a loop of one's own draws between two steps is kept apart from what training draws.

A stage that replays repeats the steps and nothing else, and what is between them may be cut off. So
training must go on as if nothing had been drawn there: in an evaluation, when a loader is opened,
by samples that are generated. The loop has a stream of its own, which begins as a copy.
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
    """Gives generators to training within a step, to the loop outside of one. Training thread only.

    A loop that draws nothing costs two looks at the generators a step.
    """

    def __init__(self) -> None:
        self._training: RngState | None = None
        self._loop: RngState | None = None

    def begin(self) -> None:
        """Training begins, from the random numbers that there are."""
        self._training = capture_rng()

    def end(self) -> None:
        """Training is over; what comes after it finds its random numbers."""
        self._to_training()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step; who recovers from an error in it puts those of training back."""
        self._to_training()
        self._training = None
        yield
        self._training = capture_rng()
        if self._loop is not None:
            restore_rng(self._loop)

    @contextmanager
    def of_training(self) -> Iterator[None]:
        """Within it, between two steps, generators are those of training."""
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
