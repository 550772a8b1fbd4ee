# SPDX-License-Identifier: Apache-2.0
"""`auto` follows the link rates and ignores their noise."""

import logging
from collections.abc import Sequence
from itertools import islice

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.config import FIXED, SparseCheckpointConfig
from moevement_ext.plan.replanning import PlanParameters, WindowLoad
from moevement_ext.plan.strategy.choice import strategy_of
from moevement_ext.plan.strategy.moevement import CONFIRMED, AutoWindow, Measured, MoEvement
from moevement_ext.plan.windows import budgets, needs, shortest
from tests.unit.plan.test_byte_planner import one_size

LONGEST = 8
NEEDS = list(islice(needs(one_size(16, 100, 10)), LONGEST))
COPIES = 2
PLENTY = 1e6


def demanded(seen: Measured) -> int | None:
    """The window that `Protection` would demand for one stage."""
    carried = budgets(
        seen.iteration_s,
        seen.copy_bytes_per_s,
        seen.send_bytes_per_s,
        COPIES,
        cpu_bytes_per_s=seen.cpu_bytes_per_s,
        cpu_share=0.02,
        failures_per_s=1 / 3600,
    )
    return shortest([NEEDS], carried, LONGEST)


class Training:
    """Rank 0 of a job, window after window."""

    def __init__(self, window: int = 2, version: int = 0) -> None:
        self.present = PlanParameters(version=version, window=window)
        self.auto = AutoWindow(demanded, LONGEST)
        self.strategy = MoEvement(FIXED, LONGEST, self.auto, change=0.1, fraction=0.25)
        self.windows = [window]

    def observe(
        self, *sent: float | None, copied: float = PLENTY, cores: Sequence[float] = ()
    ) -> int:
        """All ranks report a window; return the next W."""
        spared = cores or [None] * len(sent)
        loads = [
            WindowLoad(
                start=self.present.origin,
                tokens={},
                iteration_s=1.0,
                copy_bytes_per_s=copied,
                send_bytes_per_s=rate,
                cpu_bytes_per_s=cpu,
            )
            for rate, cpu in zip(sent, spared, strict=True)
        ]
        chosen = self.strategy.next(self.present, loads)
        self.present = chosen or self.present
        self.windows.append(self.present.window)
        return self.present.window

    def changes(self) -> int:
        return sum(a != b for a, b in zip(self.windows, self.windows[1:], strict=False))


def settled(rate: float) -> int:
    return demanded(Measured(1.0, PLENTY, rate)) or LONGEST


def observe_all(training: Training, rates: Sequence[float]) -> None:
    for rate in rates:
        training.observe(rate)


@pytest.mark.parametrize(('cores_train', 'first'), [(True, 1), (False, 2)])
def test_first_window_takes_no_memory_that_cores_would_not_be_given(
    cores_train: bool, first: int
) -> None:
    strategy = strategy_of(SparseCheckpointConfig(), LONGEST, demanded, cores_train)
    assert strategy.first().window == first


def test_slow_link_lengthens_the_window_temporarily() -> None:
    """One rank of three sends slowly for a time."""
    training = Training()
    training.observe(PLENTY, PLENTY, PLENTY)
    assert training.present.window == 1
    slow = 2500.0
    needed = settled(slow)
    assert 1 < needed < LONGEST
    for _ in range(CONFIRMED - 1):
        assert training.observe(PLENTY, slow, PLENTY) == 1
    assert training.observe(PLENTY, slow, PLENTY) == needed
    for _ in range(20):
        assert training.observe(PLENTY, slow, PLENTY) == needed
    for _ in range(CONFIRMED - 1):
        assert training.observe(PLENTY, PLENTY, PLENTY) == needed
    assert training.observe(PLENTY, PLENTY, PLENTY) == 1
    assert training.changes() == 3, 'from the guess, to longer, and back'


def test_single_slow_window_changes_nothing() -> None:
    training = Training()
    for _ in range(10):
        observe_all(training, [PLENTY, PLENTY, PLENTY, 100.0])
    assert set(training.windows[1:]) == {1}


@given(
    st.floats(500.0, 20_000.0),
    st.lists(st.floats(0.9, 1.1), min_size=40, max_size=40),
    st.integers(1, LONGEST),
)
def test_noise_never_reverses_a_change(rate: float, noise: list[float], window: int) -> None:
    """Wherever the rate lies between the thresholds of two windows."""
    training = Training(window, version=1)
    observe_all(training, [rate * factor for factor in noise])
    assert training.windows in (sorted(training.windows), sorted(training.windows)[::-1])
    steady = training.present.window
    assert settled(1.4 * rate) <= steady <= settled(rate / 1.4), 'and is near what is needed'


def test_slow_copy_lengthens_the_window() -> None:
    training = Training(1, version=1)
    for _ in range(CONFIRMED):
        training.observe(PLENTY, copied=900.0)
    assert training.present.window == demanded(Measured(1.0, 900.0, PLENTY)) == 3


def test_busy_cores_lengthen_the_window_temporarily() -> None:
    """By the rank with the fewest spare cores, although links carry any window."""
    training = Training()
    assert training.observe(PLENTY, PLENTY, cores=[PLENTY, 2000.0]) == 1
    for _ in range(CONFIRMED - 1):
        assert training.observe(PLENTY, PLENTY, cores=[450.0, PLENTY]) == 1
    assert training.observe(PLENTY, PLENTY, cores=[450.0, PLENTY]) == 2
    for _ in range(CONFIRMED):
        training.observe(PLENTY, PLENTY, cores=[PLENTY, PLENTY])
    assert training.present.window == 1
    assert training.changes() == 3


@pytest.mark.parametrize('limit', [need.sent for need in NEEDS[:2]])
def test_alternating_core_load_never_reverses_a_change(limit: int) -> None:
    """Three windows on either side of a threshold, so that each change is confirmed."""
    for first in range(1, LONGEST + 1):
        training = Training(first, version=1)
        for _ in range(5):
            for factor in [0.95] * CONFIRMED + [1.05] * CONFIRMED:
                training.observe(PLENTY, cores=[limit * factor])
        assert training.windows in (sorted(training.windows), sorted(training.windows)[::-1])


def test_permanently_busy_cores_cause_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert Training().observe(PLENTY, cores=[1e-3]) == 2
    assert not caplog.text


def test_shortest_measured_iteration_time_counts() -> None:
    """All ranks wait for the rank that its copies delay; only that rank measures the true time."""
    auto = AutoWindow(demanded, LONGEST)
    loads = [
        WindowLoad(
            start=0, tokens={}, iteration_s=seconds, copy_bytes_per_s=1e4, send_bytes_per_s=None
        )
        for seconds in (3.0, 0.1, 3.0)
    ]
    assert auto(PlanParameters(window=2), loads) == demanded(Measured(0.1, 1e4, None))


def test_window_stays_without_a_measured_copy() -> None:
    training = Training()
    assert training.observe(None, copied=PLENTY) == 1, 'no holder has taken anything: no limit'
    auto = AutoWindow(demanded, LONGEST)
    uncopied = WindowLoad(
        start=0, tokens={}, iteration_s=1.0, copy_bytes_per_s=None, send_bytes_per_s=7.0
    )
    assert auto(PlanParameters(window=2), [uncopied]) == 2


def test_warning_about_the_longest_window_is_given_once(caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert training.observe(1.0) == LONGEST
    assert caplog.text.count('no window of up to 8 is long enough') == 1
    assert '--sparse-ckpt-window' in caplog.text


def test_rank_without_space_shortens_the_window_of_all() -> None:
    """Other users have taken its space in the tmpfs: it could not persist longer windows."""
    training = Training()
    assert training.observe(1.0) == LONGEST
    loads = [
        WindowLoad(
            start=training.present.origin,
            tokens={},
            iteration_s=1.0,
            copy_bytes_per_s=PLENTY,
            send_bytes_per_s=1.0,
            room=room,
        )
        for room in (3, 2)
    ]
    assert training.auto(training.present, loads) == 2
    training.present = msgspec.structs.replace(training.present, window=2)
    for _ in range(CONFIRMED + 1):
        assert training.observe(1.0) == 2, 'it does not grow again'
