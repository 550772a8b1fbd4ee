# SPDX-License-Identifier: Apache-2.0
"""Optimal intervals, against a search over all of them."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.simulate.closed_form import Dense
from tools.simulate.intervals import daly_s, exact_s, optimal, young_s


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
    system = Dense(iteration_s, 1, overhead_s, stall_s, restart_s, mtbf_s)
    best = optimal(system).exact
    assert isinstance(best, int)
    found = replace(system, interval=best).ettr_exact()
    others = [replace(system, interval=interval).ettr_exact() for interval in range(1, 300)]
    assert found == pytest.approx(max(others), rel=1e-12)


def test_real_optimum_solves_its_equation() -> None:
    seconds = exact_s(5.0, 450.0)
    assert (1 - seconds / 450) * math.exp((seconds + 5) / 450) == pytest.approx(1)


def test_approximations_meet_the_optimum_when_failures_are_rare() -> None:
    assert young_s(5, 1e6) == pytest.approx(math.sqrt(1e7))
    assert daly_s(5, 450) == pytest.approx(exact_s(5, 450), rel=1e-4)
    assert young_s(5, 450) == pytest.approx(exact_s(5, 450), rel=0.06)
    assert daly_s(1000, 450) == 450


def test_limits() -> None:
    free = optimal(Dense(1.0, 7, overhead_s=0.5, mtbf_s=600))
    assert (free.exact, free.young, free.daly) == (1, 1, 1)
    never = optimal(Dense(1.0, 7, stall_s=2.0))
    assert never.exact == never.young == never.daly == math.inf
    hopeless = optimal(Dense(10.0, 7, stall_s=5000.0, mtbf_s=20))
    assert hopeless.exact in (1, 2)
