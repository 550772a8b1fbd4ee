# SPDX-License-Identifier: Apache-2.0
"""Closed forms by hand, the simulation against them, and the profiles and systems it is given."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.tools.runs import EXPOSED_S, localized_run, write
from tools.simulate.closed_form import Dense, Sparse
from tools.simulate.experts import lost_by_checkpoint
from tools.simulate.monte_carlo import FailureTimes, Histories, Pipeline, Run, SparseRun, simulate
from tools.simulate.profile import OperatorProfile, Profile, derive
from tools.simulate.systems import Options, build


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


def test_losses_match_a_hand_calculation() -> None:
    """Three experts in turn: the one of last time has lost nothing, that before one checkpoint."""
    shares = np.array([0.1, 0.2, 0.7])
    losses = lost_by_checkpoint(shares, 1, 'sequential')
    assert losses[:3] == pytest.approx([2 * 0.2 + 0.7, 2 * 0.7 + 0.1, 2 * 0.1 + 0.2])
    assert losses == pytest.approx(np.tile(losses[:3], len(losses) // 3))
    # Of the unsaved, 0.7 is always most: it is saved each time but when another has waited long.
    assert lost_by_checkpoint(shares, 1, 'load-aware').mean() < losses.mean() == pytest.approx(1)


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


# 8 experts of 120 bytes and 40 of the rest; 8 s of an iteration hide a copy; the network halves.
PROFILE = Profile(
    format='moevement-profile/1',
    iteration_s=10.0,
    operators=(
        *(OperatorProfile(f'expert{index}', 120, 8, 1.0) for index in range(8)),
        OperatorProfile('rest', 40, 5),
    ),
    copy_bytes_per_s=50.0,
    network_bytes_per_s=100.0,
    disk_bytes_per_s=4.0,
    replicas=4,
    restart_s=3.0,
    pipeline=Pipeline(4, 4, 8),
)
OPTIONS = Options(mtbf_s=3600.0, job_hours=10.0)


def dense(name: str, options: Options = OPTIONS, profile: Profile = PROFILE) -> Dense:
    costs = build(name, options, profile).costs
    assert isinstance(costs, Dense)
    return costs


def test_checkfreq_waits_for_the_disk() -> None:
    # 1,000 bytes: 250 s to disk, so 25 iterations; the snapshot's 20 s less 8 hidden are the stall.
    costs = dense('checkfreq')
    assert costs.stall_s == pytest.approx(12)
    # At most 3 % of an iteration (Mohan et al., FAST'21, as the paper's evaluation has it).
    assert costs.period == math.ceil(12 / (0.03 * 10)) == 40
    assert costs.restart_s == pytest.approx(3 + 250 + 250)
    fast = replace(PROFILE, copy_bytes_per_s=1000.0)
    found = dense('checkfreq', profile=fast)
    assert (found.period, found.stall_s) == (25, 0)


def test_gemini_spreads_its_traffic_but_not_its_copy() -> None:
    # 25 bytes/s to 4 replicas: 40 s of traffic; 12 s of the copy at 50 bytes/s stall in any case.
    costs = dense('gemini')
    best = max(
        (dense('gemini', replace(OPTIONS, interval=n)) for n in range(1, 100)),
        key=lambda one: one.ettr_exact(),
    )
    assert costs.period == best.period > 5
    assert dense('gemini', replace(OPTIONS, interval=2)).stall_s == pytest.approx(40 - 16)
    assert dense('gemini', replace(OPTIONS, interval=9)).stall_s == pytest.approx(1000 / 50 - 8)
    # Loading 10 s, and 4 iterations until the other 28 s have passed.
    assert dense('gemini', replace(OPTIONS, interval=9)).restart_s == pytest.approx(3 + 10 + 40)
    young = dense('gemini', replace(OPTIONS, interval_rule='young'))
    assert young.period == round(math.sqrt(2 * 32 * 3600) / 10)
    fast = replace(PROFILE, copy_bytes_per_s=1000.0)
    assert dense('gemini', replace(OPTIONS, interval=9), fast).stall_s == 0
    assert dense('gemini', profile=fast).period == 5, 'these hide all of the traffic'


MTBF_S = 24.0
"""Of the sample run: one failure in so many seconds."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path / 'events', localized_run())


def test_events_give_the_profile(run: Path) -> None:
    found = derive(run, {})
    assert found.iteration_s == pytest.approx(1 - EXPOSED_S)
    assert (found.copy_bytes_per_s, found.network_bytes_per_s) == (1e9, 1e8)
    assert found.disk_bytes_per_s is None
    assert (found.replicas, found.mtbf_s) == (1, MTBF_S)
    assert found.restart_s == pytest.approx(4.5 - 2)  # without convert and catch_up
    assert found.pipeline == Pipeline(nodes=4, stages=2)
    assert found.operators == (
        OperatorProfile('layer1.router', 12, 2),
        OperatorProfile('layer1.expert0', 240, 40, 1.0),
        OperatorProfile('layer1.expert1', 240, 40, 1.0),
    )
