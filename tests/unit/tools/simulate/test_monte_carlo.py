# SPDX-License-Identifier: Apache-2.0
"""The simulation: against the closed form, against histories played by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.simulate.closed_form import Dense, Sparse
from tools.simulate.monte_carlo import FailureTimes, Histories, Pipeline, Run, SparseRun, simulate


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


def useful_s(run: Run, times: list[float], nodes: list[int], horizon_s: float) -> float:
    """Useful seconds of a history of 4 nodes, of which two equal ones are played."""
    drawn = FailureTimes(np.array([times] * 2), np.array([nodes] * 2))
    return horizon_s * Histories(run, drawn, 4).play(horizon_s).ettr


def test_simulation_matches_failures_played_by_hand() -> None:
    # Period 10 s of 8 useful, restart 4. Failure at 25: 2 periods kept, back at 29. At 27: struck
    # again, back at 31. To 60: 2 periods, and 9 s of 10 in progress.
    run = Run(Dense(2.0, 4, 0.5, 4.0), 2)
    assert useful_s(run, [25.0, 27.0], [0, 0], 60.0) == pytest.approx(16 + 0.8 * 29)


def kept_of_800(nodes: list[int], seed: int = 0, **given: object) -> float:
    """Useful seconds of 800, all nodes lost at 100, which strikes an iteration of 8 s at 96."""

    rng, sparse = np.random.default_rng(seed), Sparse(8.0, 5 if 'copies' in given else 1)
    run = SparseRun(sparse, 2, rng, **given)  # type: ignore[arg-type]
    return useful_s(run, [100.0] * len(nodes), nodes, 800.0)


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
