# SPDX-License-Identifier: Apache-2.0
"""The simulation: against the closed form, against one played by hand, and its special cases."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.simulate.closed_form import Dense, Sparse
from tools.simulate.failures import FailureTimes, Process, Trace
from tools.simulate.monte_carlo import Pipeline, Run, Spares, SparseRun, simulate

SYSTEMS: list[Dense | Sparse] = [
    Sparse(2.9, 6, 0.06, 0.0, 600.0),
    Sparse(2.0, 10, 0.1, 5.0, 60.0, 0.2, 0.33),
    Sparse(1.0, 1, 0.0, 0.0, 20.0),
    Dense(3.12, 150, 0.345, 15.0, 450.0),
    Dense(3.0, 20, 0.1, 30.0, 100.0, 5.0),
]


def slow_ettr(system: Dense | Sparse, failures: list[float], position: int) -> float:
    """One history, iteration by iteration, from a failure at 0 to the last one."""
    strikes = iter(failures)
    strike = next(strikes)
    clock = useful = 0.0
    done = 0  # iterations of the running period
    recovering = True
    while True:
        if recovering:
            span = system.restart_s
            if isinstance(system, Sparse):
                span = float(system.recovery_s()[position])
        else:
            span = system.step_s
            if isinstance(system, Dense) and done == system.period - 1:
                span += system.stall_s
        if clock + span > strike:
            clock, recovering, done = strike, True, 0
            strike = next(strikes, math.inf)
            if strike == math.inf:
                return useful / clock
            continue
        clock += span
        if recovering:
            recovering = False
        elif isinstance(system, Sparse):
            useful += system.iteration_s
            position = (position + 1) % system.period
        else:
            done = (done + 1) % system.period
            useful += system.period * system.iteration_s * (done == 0)


@pytest.mark.parametrize('system', SYSTEMS, ids=str)
def test_vectorized_histories_equal_a_simulation_iteration_by_iteration(
    system: Dense | Sparse,
) -> None:
    class Given(Process):
        def first(
            self, rng: np.random.Generator, histories: int, count: int, nodes: int
        ) -> FailureTimes:
            return FailureTimes(np.array([times, times]), np.zeros((2, 300), dtype=int))

    gaps = np.random.default_rng(5).exponential(system.mtbf_s, 300)
    times = gaps.cumsum()
    positions: list[np.ndarray] = []

    def make(histories: int, rng: np.random.Generator) -> Run:
        assert isinstance(system, Sparse)
        run = SparseRun(system, histories, rng)
        positions.append(run.position.copy())
        return run

    found = simulate(make if isinstance(system, Sparse) else system, Given(1.0), histories=2)
    starts = positions[0] if positions else [0, 0]
    expected = [slow_ettr(system, times.tolist(), int(start)) for start in starts]
    assert found.ettr == pytest.approx(np.mean(expected), rel=1e-9)


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
