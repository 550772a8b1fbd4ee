# SPDX-License-Identifier: Apache-2.0
"""MoEvement: a slice of the state in every iteration, windows back to back (the paper's method).

`--sparse-ckpt-window auto` follows measured rates without flapping: W grows once several windows in
a row demand a longer window even at rates better than measured by `MARGIN`, and shrinks once they
allow a shorter window even at rates worse by `MARGIN`. So smaller variations, or a hiccup in one
window, change nothing, and a change of W is never undone unless the rates change.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from moevement_ext.config import FIXED
from moevement_ext.logger import logger_of
from moevement_ext.plan.popularity import Popularity, moved
from moevement_ext.plan.replanning import PlanParameters, WindowLoad

logger = logger_of(__name__)

FIRST_WINDOW = 2
"""W before rates are measured; 1 where cores train, as few bytes are worth as few iterations."""
CONFIRMED = 3
"""Windows in a row that must agree on a change."""
MARGIN = 1.25
"""Factor of better or worse rates in decisions; larger than the usual variation of rates."""


class Measured(NamedTuple):
    """Rates that limit a window, each of the slowest rank."""

    iteration_s: float
    """Seconds per iteration, without waits for copies."""
    copy_bytes_per_s: float
    send_bytes_per_s: float | None
    """Send rate to holders of replicas; None before the first send, or without holders."""
    cpu_bytes_per_s: float | None = None
    """Capture rate at which helper threads stay within their share of the cores; None: no limit."""

    def faster(self, factor: float) -> 'Measured':
        sent, captured = self.send_bytes_per_s, self.cpu_bytes_per_s
        return Measured(
            self.iteration_s,
            factor * self.copy_bytes_per_s,
            None if sent is None else factor * sent,
            None if captured is None else factor * captured,
        )


class MoEvement:
    """Windows of W slots. W follows the link rates; experts are ordered by popularity.

    `longest` is the W for which host memory is reserved. `auto_window` computes the next W from
    the measurements, and `first` is W before them; without it, W stays `longest`. The other
    arguments are the flag `--sparse-ckpt-order`, and `reorder_change` and `reorder_fraction` of
    the configuration.
    """

    def __init__(
        self,
        order: str,
        longest: int,
        auto_window: Callable[[PlanParameters, Sequence[WindowLoad]], int] | None,
        change: float,
        fraction: float,
        first: int = FIRST_WINDOW,
    ) -> None:
        self.counts_tokens = order != FIXED
        self._popularity = Popularity(order)
        self._first = longest if auto_window is None else min(longest, first)
        self._auto_window = auto_window
        self._change, self._fraction = change, fraction

    def first(self) -> PlanParameters:
        """Windows of the fixed length, or short ones, in the order of the model."""
        return PlanParameters(window=self._first)

    def next(self, present: PlanParameters, loads: Sequence[WindowLoad]) -> PlanParameters | None:
        """A plan with another order or W, once loads or rates have changed enough."""
        shares = self._popularity.of(loads, present.shares)
        reorder = moved(present.shares, shares, self._change, self._fraction)
        window = present.window
        if self._auto_window is not None:
            window = self._auto_window(present, loads)
        if not reorder and window == present.window:
            return None
        shares = shares if reorder else present.shares
        return present.changed(loads[0].start, window=window, shares=shares)


class AutoWindow:
    """Chooses W, at most `longest`, for which all nodes have host memory.

    Rank 0's replanner thread.

    `shortest` returns the fewest slots that links and cores sustain at these rates; None: the links
    sustain no window of up to `longest` slots.
    """

    def __init__(self, shortest: Callable[[Measured], int | None], longest: int) -> None:
        self._shortest = shortest
        # Reduced when a rank reports that it has host memory only for shorter windows.
        self._longest = longest
        self._window = 0
        # Measurements in windows of the current length.
        self._seen: deque[Measured] = deque(maxlen=CONFIRMED)
        self._warned = False

    def __call__(self, present: PlanParameters, loads: Sequence[WindowLoad]) -> int:
        """The next W, usually that of `present`, the plan in force in the window of `loads`."""
        rooms = [load.room for load in loads if load.room is not None]
        self._longest = min([self._longest, *rooms])
        seen = _measured(loads)
        if seen is None or present.window > self._longest:
            return min(present.window, self._longest)
        if self._window != present.window:
            self._window = present.window
            self._seen.clear()
        self._seen.append(seen)
        if present.version == 0:  # the first window was a guess, without measurements
            return self._demanded(seen)
        if len(self._seen) < CONFIRMED:
            return present.window
        return self._confirmed(present.window)

    def _confirmed(self, present: int) -> int:
        if all(self._demanded(seen.faster(MARGIN)) > present for seen in self._seen):
            return max(map(self._demanded, self._seen))
        return min(present, max(self._demanded(seen.faster(1 / MARGIN)) for seen in self._seen))

    def _demanded(self, seen: Measured) -> int:
        found = self._shortest(seen)
        if found is not None and found > self._longest:
            found = None
        if found is None and not self._warned:
            self._warned = True
            logger.warning(
                'no window of up to %d is long enough for the links: iterations will be longer, '
                'or windows skipped; allow a longer one (--sparse-ckpt-window, host memory), '
                'fewer --sparse-ckpt-replicas, or spread the state over more ranks',
                self._longest,
            )
        return self._longest if found is None else found


def _measured(loads: Sequence[WindowLoad]) -> Measured | None:
    """The rates of the slowest ranks; None before the first copy.

    The shortest iteration counts: all ranks wait for the rank whose copies delay its update, and
    only this rank measures that delay.
    """
    copied = _least(load.copy_bytes_per_s for load in loads)
    if copied is None:
        return None
    return Measured(
        min(load.iteration_s for load in loads),
        copied,
        _least(load.send_bytes_per_s for load in loads),
        _least(load.cpu_bytes_per_s for load in loads),
    )


def _least(rates: Iterable[float | None]) -> float | None:
    return min((rate for rate in rates if rate is not None), default=None)
