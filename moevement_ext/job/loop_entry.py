# SPDX-License-Identifier: Apache-2.0
"""Calls the training loop, and leaves it after an interrupted step even if the loop continues."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from moevement_ext.logger import logger_of

logger = logger_of(__name__)


class LoopGoesOn(BaseException):
    """The loop caught the error that interrupted a step and requested the next step."""


class LoopEntry:
    """The current call of the loop. Training thread. `cut_off` has interrupted a step."""

    def __init__(self) -> None:
        self.cut_off: BaseException | None = None
        # A step of this call has begun; None before the first call.
        self._stepped: bool | None = None

    def enter(self, run: Callable[[], Any]) -> Any:
        """Call the loop; raise the error that interrupted a step, even if the loop caught it.

        The error does not stay on this object: its traceback holds the frames of the
        interrupted step, which must be freed.
        """
        again, self._stepped = self._stepped is not None, False
        try:
            result = run()
        except LoopGoesOn:
            result = None
        except Exception as error:
            if again and not self._stepped:
                logger.warning(
                    'the loop was entered again and raised %r before its first step; no rank is '
                    'connected until that step returns, so use torch.distributed only after it',
                    error,
                )
            raise
        finally:
            cut_off, self.cut_off = self.cut_off, None
        if cut_off is not None:
            logger.warning('leaving the loop after %r in a step', cut_off)
            raise cut_off
        return result

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record the error that interrupts a step; `LoopGoesOn` if an earlier one was cut off."""
        if self.cut_off is not None:
            raise LoopGoesOn
        self._stepped = True
        try:
            yield
        except BaseException as error:
            self.cut_off = error
            raise
