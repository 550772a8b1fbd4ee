# SPDX-License-Identifier: Apache-2.0
"""The ablation: which faults it puts on a job, and what it makes of what was measured."""

import itertools
from pathlib import Path

import msgspec
import pytest

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.events import Recovered
from tools.bench.ablation import WAYS, Bench, Measured, main, measured, summarize
from tools.lab.digests import StateDigest
from tools.lab.errors import LabError
from tools.lab.hardware import Hardware
from tools.lab.run_log import Iteration, RunLog
from tools.lab.trained import Trained

BENCH = Bench(Path('data'), Path('output'), window=4, faults=3)


def test_ways_differ_in_one_part_each() -> None:
    for before, after in itertools.pairwise(WAYS):
        assert sum(one != other for one, other in zip(before[1:], after[1:], strict=True)) == 1
    last = WAYS[-1]
    default = SparseCheckpointConfig()
    assert last[1:] == (default.freeze, default.order, default.recovery)


def test_a_window_is_complete_before_each_fault() -> None:
    assert BENCH.trace == [(10, 1), (20, 3), (30, 1)]
    assert BENCH.iterations == 34


def logged(*times: float) -> RunLog:
    return RunLog([[Iteration(time, number, 0.0, 1.0) for number, time in enumerate(times, 1)]], [])


def recovered(rank: int, time: float, replayed: int) -> Recovered:
    back = Recovered(
        target=9,
        replayed=replayed,
        verified=1,
        verified_at=5,
        differing=[],
        seconds={'convert': 0.5},
    )
    return msgspec.structs.replace(back, rank=rank, time=time)


PLAIN = Trained(logged(*range(8)), StateDigest('00', 8, {}), [])


def test_what_a_job_with_a_fault_comes_to(tmp_path: Path) -> None:
    """Four iterations of a second each took eight."""
    events = [recovered(0, 5.0, 0), recovered(1, 6.5, 3)]
    job = Trained(logged(0, 1, 2, 3, 4, 9, 10, 11), PLAIN.state, events)
    found = measured(job, [4.5], PLAIN, WAYS[0], 4, tmp_path)
    assert (found.ettr, found.recovery_s, found.again) == (0.5, 2.0, 3.0)
    assert found.phases == {'convert': 0.5}
    assert found.predicted is None, 'these events do not say enough'
    with pytest.raises(LabError, match='not every fault was recovered from'):
        measured(job, [4.5, 7.0], PLAIN, WAYS[0], 4, tmp_path)


def test_ratios_are_to_the_first_way_of_the_round() -> None:
    def run(seconds: float, different: list[str]) -> Measured:
        return Measured(0.5, 0.6, seconds, {'convert': seconds / 2}, 6.0, different)

    rounds = [[run(n * way, []) for way in (8, 6, 5, 2)] for n in (1, 2)]
    report = summarize(Hardware.here(gpu=False), BENCH, rounds)
    assert [way.ratio.text() for way in report.ways] == ['1.00', '0.75', '0.62', '0.25']
    assert report.exact
    wrong = [*rounds[0][:3], run(1, ['experts'])]
    assert not summarize(report.hardware, BENCH, [wrong]).exact


def test_a_bad_number_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match='2'):
        main(['--faults', '0'])
    assert '--faults 0: must be at least 1' in capsys.readouterr().err
