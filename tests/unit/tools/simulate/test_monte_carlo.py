# SPDX-License-Identifier: Apache-2.0
"""The simulation: against the closed form, against histories played by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.simulate.closed_form import Dense, Sparse
from tools.simulate.failures import Trace
from tools.simulate.monte_carlo import Pipeline, Run, Spares, SparseRun, simulate


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    iteration_s=st.floats(0.5, 5),
    length=st.integers(1, 30),
    overhead_s=st.floats(0, 1),
    restart_s=st.floats(0, 60),
    mtbf_s=st.floats(60, 5000),
    sparse=st.booleans(),
)
def test_closed_form_is_the_mean(
    iteration_s: float,
    length: int,
    overhead_s: float,
    restart_s: float,
    mtbf_s: float,
    sparse: bool,
) -> None:
    system: Dense | Sparse
    if sparse:
        system = Sparse(iteration_s, length, overhead_s, restart_s, mtbf_s)
    else:
        system = Dense(iteration_s, length, overhead_s, restart_s, mtbf_s, 3.0)
    found = simulate(system)
    half = (found.ci95[1] - found.ci95[0]) / 2
    assert abs(found.ettr - system.ettr_exact()) < 2.2 * half


def trace(times: list[float], nodes: list[int], repair_s: float, length_s: float) -> Trace:
    return Trace(np.array(times), np.array(nodes), np.full(len(times), repair_s), length_s)


def test_simulation_matches_failures_played_by_hand() -> None:
    # Period 10 s of 8 useful, restart 4. Failure at 25: 2 periods kept, back at 29. At 27: struck
    # again, back at 31. To 60: 2 periods, and 9 s of 10 in progress.
    system = Dense(2.0, 4, 0.5, 4.0)
    found = simulate(system, trace([25.0, 27.0], [0, 0], math.inf, 60.0), histories=2)
    assert found.useful_s[0] == pytest.approx(16 + 0.8 * 29)


def test_spares_run_out() -> None:
    # Failures at 10 and 20; a repair takes 30. One spare: the first waits for nothing, the second
    # until the first node is back at 40. None: 30 each, and the second strikes the wait.
    system = Dense(1.0, 1)

    def useful(spares: Spares | None, repair_s: float) -> float:
        failures = trace([10.0, 20.0], [0, 1], repair_s, 100.0)
        found = simulate(system, failures, nodes=2, spares=spares, histories=2)
        return float(found.useful_s[0])

    assert useful(None, 30.0) == pytest.approx(100)
    assert useful(Spares(2), 30.0) == pytest.approx(100)
    assert useful(Spares(1), 30.0) == pytest.approx(80)
    assert useful(Spares(0), 30.0) == pytest.approx(60)
    assert useful(Spares(0), math.inf) == pytest.approx(10)


def kept_of_800(nodes: list[int], seed: int = 0, **given: object) -> float:
    """Useful seconds of 800, all nodes lost at 100, which strikes an iteration of 8 s at 96."""

    def make(histories: int, rng: np.random.Generator) -> Run:
        return SparseRun(Sparse(8.0, 5 if 'copies' in given else 1), histories, rng, **given)  # type: ignore[arg-type]

    failures = trace([100.0] * len(nodes), nodes, math.inf, 800.0)
    return float(simulate(make, failures, nodes=4, histories=2, seed=seed).useful_s[0])


def test_adjacent_stages_replay_together() -> None:
    # One iteration is 8 stage times long: k stages replay it in 5 + k - 1 of them.
    pipeline, kept = Pipeline(nodes=4, stages=4, micro_batches=5), 96 + 800 - 100
    for nodes, seconds in (([2], 5), ([2, 1], 6), ([0, 2], 5), ([0, 1, 2, 3], 8)):
        assert kept_of_800(nodes, pipeline=pipeline) == pytest.approx(kept - seconds)


def test_state_is_copied_while_a_copy_is_left() -> None:
    copies = Pipeline(nodes=4, stages=2, copies=2), 3.0
    for nodes in ([0], [0, 2]):
        assert kept_of_800(nodes, copies=copies) == pytest.approx(96 + 700 - 3)
    assert kept_of_800([0, 1], seed=1, copies=copies) <= 96 + 700 - 5 * 8
