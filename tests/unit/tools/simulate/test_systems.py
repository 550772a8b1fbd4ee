# SPDX-License-Identifier: Apache-2.0
"""What a profile makes each system cost, and profiles as files."""

import math

import pytest
from msgspec.structs import replace

from tools.simulate.closed_form import Dense
from tools.simulate.monte_carlo import Pipeline
from tools.simulate.profile import OperatorProfile, Profile
from tools.simulate.systems import Options, build

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
