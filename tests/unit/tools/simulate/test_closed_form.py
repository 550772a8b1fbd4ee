# SPDX-License-Identifier: Apache-2.0
"""Closed forms: by hand, limits, monotonicity; optimal intervals against a search over all."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tools.simulate.closed_form import Dense, Sparse, optimal

SECONDS = st.floats(0.1, 10)
DENSE = st.builds(
    Dense, iteration_s=SECONDS, period=st.integers(1, 50), overhead_s=st.floats(0, 2),
    stall_s=st.floats(0, 20), restart_s=st.floats(0, 60), mtbf_s=st.floats(50, 1e5),
)  # fmt: skip
SPARSE = st.builds(
    Sparse, iteration_s=SECONDS, period=st.integers(1, 20), overhead_s=st.floats(0, 2),
    restart_s=st.floats(0, 60), mtbf_s=st.floats(50, 1e5), local_saving=st.floats(0, 0.9),
    frozen_saving=st.floats(0, 0.9),
)  # fmt: skip


def test_dense_costs_match_a_hand_calculation() -> None:
    system = Dense(3.12, 150, 0.345, 15.0, 450.0)
    period = 450 * math.exp(15 / 450) * (math.exp(519.75 / 450) - 1)
    assert system.ettr_exact() == pytest.approx(468 / period)
    assert system.expected_recovery_s() == pytest.approx(249)
    assert system.ettr_first_order() == pytest.approx(3.12 / 3.465 / (1 + 249 / 450))


def test_sparse_costs_of_window_2_match_a_hand_calculation() -> None:
    system = Sparse(2.0, 2, 0.5, 3.0, 100.0, local_saving=0.25, frozen_saving=0.4)
    # Conversion: one iteration half frozen (0.8 of the work) and one active, each 1.5 s.
    after_first, after_second = 3 + 1.5 * 1.8, 3 + 1.5 * 2.8
    attempt = 100 * (math.exp(0.025) - 1)
    window = attempt * (math.exp(after_first / 100) + math.exp(after_second / 100))
    assert system.ettr_exact() == pytest.approx(4 / window)
    assert system.recovery_s() == pytest.approx([after_first, after_second])
    assert system.expected_recovery_s() == pytest.approx((after_first + after_second) / 2 + 1)


@given(system=DENSE | SPARSE)
def test_exact_and_first_order_agree_when_failures_are_rare(system: Dense | Sparse) -> None:
    rare = replace(system, mtbf_s=1e9)
    lost = 1 - rare.ettr_exact() / replace(system, mtbf_s=math.inf).ettr_exact()
    # An overhead makes the lost part longer than the useful work in it.
    low = rare.expected_recovery_s() / 1e9
    slower = rare.step_s / rare.iteration_s
    if isinstance(rare, Dense):
        slower += rare.stall_s / (rare.period * rare.iteration_s)
    assert low * 0.999 - 1e-12 <= lost <= low * slower * 1.001 + 1e-12


@given(system=DENSE | SPARSE, factor=st.floats(1.01, 3))
def test_ettr_is_monotone(system: Dense | Sparse, factor: float) -> None:
    here = system.ettr_exact()
    assert replace(system, mtbf_s=system.mtbf_s * factor).ettr_exact() >= here
    assert replace(system, overhead_s=system.overhead_s * factor + 0.01).ettr_exact() < here
    assert replace(system, restart_s=system.restart_s * factor + 0.01).ettr_exact() < here
    if isinstance(system, Sparse):
        assert replace(system, period=system.period + 1).ettr_exact() < here
    assert 0 < here <= 1


# ---- how often


@given(
    iteration_s=st.floats(1, 10),
    overhead_s=st.floats(0, 1),
    stall_s=st.floats(0.1, 10),
    restart_s=st.floats(0, 60),
    mtbf_s=st.floats(60, 1000),
)
def test_exact_is_the_best_of_all(
    iteration_s: float, overhead_s: float, stall_s: float, restart_s: float, mtbf_s: float
) -> None:
    system = Dense(iteration_s, 1, overhead_s, restart_s, mtbf_s, stall_s)
    best = int(optimal(system)['exact'])
    found = replace(system, period=best).ettr_exact()
    others = [replace(system, period=interval).ettr_exact() for interval in range(1, 300)]
    assert found == pytest.approx(max(others), rel=1e-12)
