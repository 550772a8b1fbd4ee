# SPDX-License-Identifier: Apache-2.0
"""The comparison: its rows, its trace, its arithmetic, its table."""

from pathlib import Path

import pytest

from megatron.moevement.arguments import config_from_args
from tests.unit.tools.samples import HARDWARE, logged
from tools.compare import measuring
from tools.compare.rows import ROWS, Keeps
from tools.compare.running import Course, Lived, draw_faults
from tools.compare.strategies import CompareBench
from tools.lab.digests import StateDigest
from tools.lab.errors import LabError
from tools.lab.job import Kind, Trained
from tools.lab.run_log import Captured, RunLog
from tools.lab.trainer_flags import trainer_parser

VALUES = {'window': '3', 'mtbf_s': 60.0, 'network_gb_per_s': 0.02, 'disk': '/disk'}
SAME, OTHER = StateDigest('00', 8, {}), StateDigest('11', 8, {'0': {'parameter/x': '1'}})


# ---- rows


def flags_of(name: str) -> list[str]:
    return ROWS[name].training_flags(Path('/folder'), Path('/memory'), 6, **VALUES)


@pytest.mark.parametrize('name', ROWS)
def test_the_trainer_takes_the_flags_of_a_row(name: str) -> None:
    flags = flags_of(name)
    parsed, unknown = trainer_parser().parse_known_args(flags)
    assert not [flag for flag in unknown if flag.startswith('--sparse-ckpt')]
    config_from_args(parsed)  # refuses what has no use
    assert ('--sparse-ckpt' in flags) == (ROWS[name].keeps is Keeps.MEMORY)
    assert not any('{' in flag for flag in flags)


# ---- trace


def test_a_trace_is_the_same_for_a_seed_and_apart() -> None:
    faults = draw_faults(3, 4, 10.0, 50.0, 4)
    assert faults == draw_faults(3, 4, 10.0, 50.0, 4) != draw_faults(4, 4, 10.0, 50.0, 4)
    assert [fault.kind for fault in faults] == [Kind.KILL, Kind.NODE] * 2
    assert 10 <= faults[0].at_s and faults[-1].at_s <= 50
    gaps = [after.at_s - one.at_s for one, after in zip(faults, faults[1:], strict=False)]
    assert min(gaps) >= 5.0 - 0.001
    assert {fault.rank for fault in faults} <= set(range(4))


# ---- arithmetic


PLAIN = logged(*((float(number), number) for number in range(1, 11)))
"""Ten iterations of a second."""
ROLLED_BACK = logged(
    (1, 1), (2, 2), (3, 3), (4, 4), (5, 5),  # at 5.5 all is killed, the newest checkpoint is of 3
    (9, 4), (10, 5), (11, 6), (12, 7), (13, 8), (14, 9), (15, 10),
)  # fmt: skip
RESTARTED = Lived(Trained(ROLLED_BACK, SAME, []), [5.5], [0.0, 0.5, 7.5], 4000)
COURSE = Course(Path(), Path(), 12, 0, 4, 3, 'auto', fork=True)


def test_figures_are_relative_to_plain_megatron() -> None:
    found = measuring.figures(
        ROWS['torch-dist-sync'], RESTARTED, Lived(Trained(PLAIN, OTHER, [])), COURSE
    )
    assert (found.ratio, found.iteration_s, found.recovery_s) == (1.0, 1.0, 5.5)
    assert (found.ettr, found.ettr_warm) == (9 / 14, 9 / 12)
    assert found.again == 4.0, 'two iterations on two stages'
    assert (found.period, found.mbytes, found.bits) == (3, 4000 / 4 / 3 / 1e6, 'parameter')
    with pytest.raises(LabError, match='fewer than two'):
        measuring.span_s(logged((1, 1)))


def test_save_costs_the_additional_time_of_its_iteration() -> None:
    """Every third iteration saves for half a second; every fourth evaluates for longer."""
    times, now = [], 0.0
    for number in range(1, 13):
        now += 1.0 + (0.5 if number % 3 == 1 else 0) + (7.0 if number % 4 == 1 else 0)
        times.append((now, number))
    job = Lived(Trained(logged(*times), SAME, []))
    assert measuring.waited_ms(Keeps.DISK, job, COURSE) == pytest.approx(500 / 3)
    slow = [(now + 4.0 * (number > 9), number) for now, number in times]
    late = job._replace(trained=Trained(logged(*slow), SAME, []))
    found = measuring.waited_ms(Keeps.DISK, late, COURSE)
    assert found == pytest.approx((500 + 4000 / 3) / 3), 'one of three saves took 4 s longer'
    log = RunLog(job.trained.log.attempts, [Captured(1, 2, 10, 3.0), Captured(3, 2, 10, 9.0)])
    captured = job._replace(trained=Trained(log, SAME, []))
    assert measuring.waited_ms(Keeps.MEMORY, captured, COURSE) == 1.0, 'of twelve iterations'


# ---- report


def test_only_a_broken_promise_fails() -> None:
    flags = ['--quick', '--rows', 'torch-dist-sync,localized']
    bench = CompareBench(CompareBench.parse(flags), Path(), Path())
    plain, equal = Lived(Trained(PLAIN, OTHER, [])), Lived(Trained(ROLLED_BACK, OTHER, []), [5.5])
    dense = measuring.figures(ROWS['torch-dist-sync'], RESTARTED, plain, COURSE)
    for job, broken in ((equal, []), (RESTARTED, ['localized'])):
        own = measuring.figures(ROWS['localized'], job, plain, COURSE)
        found = bench.summary(HARDWARE, [{'torch-dist-sync': dense, 'localized': own}])
        assert found.different == broken
    assert found.notes[-1] == 'MoEvement, localized: the final state differs in parameter, rank.'
    assert found.ways['torch-dist-sync'].title == 'torch_dist, synchronous *'


def test_iterations_that_were_trained_again_count_for_nothing() -> None:
    curves = measuring.curves(RESTARTED)
    found = measuring.goodput(curves, 1.0, 2.0)
    # Iterations 1 to 3 end at 0, 1, 2 s; 4 to 10 at 8 to 14 s.
    assert found.tolist() == [1.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]
    assert curves.faults == [4.5]
