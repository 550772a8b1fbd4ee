# SPDX-License-Identifier: Apache-2.0
"""Jobs of the GPU check, without a GPU: what they accept and name, and the probe of copies."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moevement_ext.events import ProtectionReduced, Recovered
from tests.gpu.jobs import copies, four_rank, nccl
from tests.gpu.jobs.copy_probe import Sizes, Stage, Window, busy
from tests.gpu.jobs.nccl_rank import Measured
from tests.gpu.jobs.training import compare, costs, reduced
from tests.unit.tools.samples import event
from tools.lab.digests import StateDigest
from tools.lab.evidence import Recovery, Tier
from tools.lab.job import Trained
from tools.lab.run_log import Captured, Iteration, RunLog

GOOD_PROBE: dict[str, Any] = {
    'pinned_gb_s': 50.0,
    'registered_gb_s': 49.0,
    'busy_over_limit': 0.96,
    'identical': True,
    'small_copy': {'beside': {'p99_ms': 1.4}},
}


@pytest.mark.parametrize(
    ('figures', 'problem'),
    [
        ({'registered_gb_s': 40.0}, 'registered tmpfs reach 0.80 of pinned'),
        ({'busy_over_limit': 0.80}, 'captures reach 0.80 of one large copy into pinned memory'),
        ({'identical': False}, 'what was captured is not the state'),
        ({'small_copy': {'beside': {'p99_ms': 9.0}}}, 'waits 9.0 ms'),
    ],
)
def test_copies_are_judged_by_pinned_bandwidth(figures: dict[str, Any], problem: str) -> None:
    assert copies.judge(GOOD_PROBE) == []
    (found,) = copies.judge({**GOOD_PROBE, **figures})
    assert problem in found


def measured(cycle: int, rank: int, pid: int, **resources: float) -> Measured:
    still = dict.fromkeys(('descriptors', 'threads', 'memory_mib', 'gpu_used_mib'), 10.0)
    return Measured(cycle, rank, pid, 'returned', '', '', 0, 0.1, 0.2, {**still, **resources})


def test_only_growth_within_a_process_is_drift() -> None:
    attempts = [
        measured(0, 0, 1),
        measured(1, 0, 1, descriptors=12.0, memory_mib=90.0),  # what libraries keep
        measured(2, 0, 1, descriptors=14.0, memory_mib=90.0),
        measured(0, 1, 2, threads=10.0),
        measured(2, 1, 3, threads=90.0),  # the process that took its place
    ]
    drift = nccl.worst_drift(attempts)
    assert drift == {'descriptors': 2.0, 'threads': 0.0, 'memory_mib': 0.0, 'gpu_used_mib': 0.0}
    assert nccl.judge(drift) == [], 'some sockets of NCCL come and go'
    assert nccl.judge({**drift, 'descriptors': 5.0, 'threads': 1.0}) == [
        'descriptors grew by 5',
        'threads grew by 1',
    ]


def trained(digest: str = 'a', **fields: Any) -> Trained:
    attempts = [[Iteration(float(n), n, 100.0 if n < 4 else 50.0, 5.0) for n in range(1, 6)]]
    log = RunLog(attempts, [Captured(n, 2, 64, 9.0 if n < 4 else 0.5) for n in range(1, 6)])
    state = StateDigest(digest, 8, {'0': {'master/w': digest}})
    return Trained(log, state, **{'events': [], 'recovery': None, **fields})


def test_states_and_costs_are_compared() -> None:
    plain = trained()
    assert compare(plain, trained(), 'killed') == []
    (problem,) = compare(plain, trained('b'), 'killed')
    assert problem == 'killed: the final state differs in master'
    assert costs(plain, trained()) == {
        'plain_ms': 50.0,
        'windows_ms': 50.0,
        'windows_over_plain': 1.0,
        'exposed_ms': 0.5,
    }
    less = [event(ProtectionReduced, rank, 1.0, reason='full') for rank in (0, 1)]
    assert reduced(trained(events=less)) == ['protection was reduced: full']


def back(tier: Tier, *stages_and_replayed: tuple[list[int], int]) -> Trained:
    events = [
        event(Recovered, rank, 1.0, scope='localized', stages=stages, replayed=replayed)
        for rank, (stages, replayed) in enumerate(stages_and_replayed)
    ]
    return trained(events=events, recovery=Recovery(tier, 1.0, 9, 4, 1))


def test_only_the_lost_stage_replays() -> None:
    kept, lost = ([1], 0), ([1], 4)
    assert four_rank.not_localized(back(Tier.LOCALIZED, kept, kept, lost, lost)) == []
    for wrong, problem in (
        (trained(), 'from nothing'),
        (back(Tier.WHOLE_JOB, kept, kept, lost, lost), 'from whole_job'),
        (back(Tier.LOCALIZED, lost, kept, lost, lost), 'rank 0 replayed 4'),
        (back(Tier.LOCALIZED, kept, kept, lost, kept), 'rank 3 replayed 0'),
        (back(Tier.LOCALIZED, kept, kept, ([0, 1], 4), lost), 'stages [0, 1] rolled back'),
    ):
        (found,) = four_rank.not_localized(wrong)
        assert problem in found


CPU = torch.device('cpu')
SMALL = Sizes(2**20, 64, 32, 64, 0.01, windows=2, small_calls=7)


def test_several_slots_hide_a_copy_and_hold_their_iterations(shm: Path) -> None:
    stage = Stage(CPU, SMALL)
    nbytes = sum(tensor.numel() * tensor.itemsize for tensor in stage.tensors)
    window = Window(shm / 'w', stage.operators, stage.plan(0.75 * nbytes, 1.0, None))
    assert window.slots > 1
    assert busy(CPU, stage, window, 1)['identical']
    assert window.contents_are(range(window.slots))
    assert not window.contents_are([slot + 1 for slot in range(window.slots)])
