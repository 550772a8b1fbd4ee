# SPDX-License-Identifier: Apache-2.0
"""The comparison: its rows, its trace, its arithmetic, its table."""

from pathlib import Path

import msgspec
import pytest

from megatron.moevement.arguments import config_from_args
from moevement_ext.events import Recovered, WindowPersisted
from tests.unit.tools.samples import HARDWARE, logged
from tools.compare import measuring
from tools.compare.measuring import PHASES
from tools.compare.report import (
    Comparison,
    Conditions,
    RowResult,
    goodput,
    markdown,
    over_rounds,
)
from tools.compare.rows import ROWS, Keeps
from tools.compare.running import (
    Course,
    InjectedFault,
    Lived,
    PlannedFault,
    draw_faults,
    since,
)
from tools.lab.digests import StateDigest
from tools.lab.errors import LabError
from tools.lab.figures import Spread
from tools.lab.job import Kind, Trained
from tools.lab.launch import ROOT
from tools.lab.run_log import Captured, RunLog
from tools.lab.trainer_flags import trainer_parser

VALUES = {'window': '3', 'mtbf_s': 60.0, 'network_gb_per_s': 0.02, 'disk': '/disk'}
SAME = StateDigest('00', 8, {})


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
RESTARTED = Lived(
    Trained(ROLLED_BACK, SAME, []),
    [InjectedFault(5.5, 2, Kind.KILL)],
    [0.0, 0.5, 7.5],
    Path(),
    4000,
)


def test_time_at_the_pace_of_plain_megatron_counts() -> None:
    assert measuring.pace_s(PLAIN) == 1.0
    assert measuring.ettr(PLAIN, 1.0) == 1.0
    assert measuring.ettr(ROLLED_BACK, 1.0) == 9 / 14
    assert measuring.ettr(ROLLED_BACK, 1.0, without_s=2.0) == 9 / 12
    with pytest.raises(LabError, match='fewer than two'):
        measuring.span_s(logged((1, 1)))


def test_phases_of_a_restart_follow_the_log() -> None:
    (back,) = measuring.comebacks(RESTARTED)
    assert back.seconds == 5.5, 'iteration 6 is the first that was not there'
    assert back.phases == dict(zip(PHASES, (2.0, 1.0, 1.5, 1.0), strict=True))
    assert measuring.stage_iterations(RESTARTED) == 4.0, 'two iterations on two stages'
    assert sum(back.phases.values()) == back.seconds


def recovered(rank: int, time: float, replayed: int) -> Recovered:
    back = Recovered(
        target=5, replayed=replayed, verified=1, verified_at=5, differing=[],
        seconds={'convert': 0.5, 'fetch': 0.0}, iterations=1,
    )  # fmt: skip
    return msgspec.structs.replace(back, rank=rank, time=time)


def test_a_replay_is_not_in_the_log() -> None:
    log = logged((1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (8, 6), (9, 7))
    events = [recovered(0, 6.0, 0), recovered(2, 7.0, 3), recovered(3, 6.9, 3)]
    job = Lived(
        Trained(log, SAME, events), [InjectedFault(5.5, 2, Kind.NODE)], [0.0, 6.0], Path(), 0
    )
    (back,) = measuring.comebacks(job)
    assert back.phases == dict(zip(PHASES, (0.5, 1.0, 0.0, 1.0), strict=True))
    assert back.engine == {'convert': 0.5}
    assert measuring.stage_iterations(job) == 3.0
    assert measuring.undisturbed(log, job.injected) == [1.0] * 5


def test_the_warm_up_does_not_count() -> None:
    attempts = [*logged((1, 1), (2, 2), (3, 3)).attempts, *logged((5, 1), (6, 2)).attempts]
    found = since(RunLog(attempts, []), 3)
    assert [item.number for item in found.iterations] == [3, 1, 2]
    assert measuring.repeated(found) == 2, 'these had been trained before'
    assert not since(RunLog(attempts, []), 4).iterations
    slots = [Captured(number, 2, 10, 0.0) for number in (2, 3, 1)]
    assert since(RunLog(attempts, slots), 3).captured == slots[1:]


def test_save_costs_the_additional_time_of_its_iteration() -> None:
    """Every third iteration saves for half a second; every fourth evaluates for longer."""
    times, now = [], 0.0
    for number in range(1, 13):
        now += 1.0 + (0.5 if number % 3 == 1 else 0) + (7.0 if number % 4 == 1 else 0)
        times.append((now, number))
    course = Course(Path(), Path(), 12, 0, 4, 3, 'auto', 0.0, 0.0, 10.0, True)
    job = RESTARTED._replace(trained=Trained(logged(*times), SAME, []), injected=[])
    assert measuring.waited_ms(Keeps.DISK, job, course) == pytest.approx(500 / 3)
    slow = [(now + 4.0 * (number > 9), number) for now, number in times]
    late = job._replace(trained=Trained(logged(*slow), SAME, []))
    found = measuring.waited_ms(Keeps.DISK, late, course)
    assert found == pytest.approx((500 + 4000 / 3) / 3), 'one of three saves took 4 s longer'
    log = RunLog(job.trained.log.attempts, [Captured(1, 2, 10, 3.0), Captured(3, 2, 10, 9.0)])
    captured = job._replace(trained=Trained(log, SAME, []))
    assert measuring.waited_ms(Keeps.MEMORY, captured, course) == 1.0, 'of twelve iterations'


def test_faults_before_the_first_checkpoint_are_counted() -> None:
    assert measuring.unprotected(Keeps.NOTHING, RESTARTED, 3) == 0
    assert measuring.unprotected(Keeps.DISK, RESTARTED, 3) == 0, 'iteration 4 was logged before'
    assert measuring.unprotected(Keeps.DISK, RESTARTED, 5) == 1
    assert measuring.unprotected(Keeps.MEMORY, RESTARTED, 3) == 1
    window = msgspec.structs.replace(WindowPersisted(start=1, plan=''), time=5.0)
    protected = RESTARTED._replace(trained=Trained(ROLLED_BACK, SAME, [window]))
    assert measuring.unprotected(Keeps.MEMORY, protected, 3) == 0


def capturing(*slots: Captured) -> Lived:
    """Ten iterations of a second after a warm-up of two."""
    log = since(RunLog(PLAIN.attempts, list(slots)), 3)
    return RESTARTED._replace(trained=Trained(log, SAME, []))


def test_interval_is_that_of_most_iterations() -> None:
    """Not of most windows: `auto` begins with short ones."""
    windows = [2, 2, 2, 2, 2, 2, 8, 8, 8, 8]
    job = capturing(*(Captured(1 + n, window, 10, 0.0) for n, window in enumerate(windows)))
    assert measuring.period(Keeps.MEMORY, job, 6) == 2
    dense = capturing(*(Captured(number, 1, 10, 0.0, 3) for number in range(1, 11)))
    assert measuring.period(Keeps.MEMORY, dense, 6) == 3
    assert measuring.period(Keeps.DISK, job, 6) == 6
    assert measuring.period(Keeps.NOTHING, RESTARTED, 6) == 10


# ---- report


def results(ettr: float, different: list[str], name: str = 'global') -> RowResult:
    row = ROWS[name]
    spreads = {'ratio': 1.1, 'stall_ms': 3.0, 'recovery_s': 5.5, 'ettr_warm': ettr + 0.1}
    first, second = (
        RowResult(
            title=row.title, exact=row.exact, lossy=row.lossy, throttled=row.throttled, period='3',
            bytes=2e6, phases=dict.fromkeys(PHASES, 1.0), engine={}, again=4.0, lost_tokens=None,
            loss_difference=0.0, different=different, unprotected=0, ettr=Spread.of([value]),
            curves=measuring.curves(RESTARTED),
            **{name: Spread.of([value]) for name, value in spreads.items()},
        )
        for value in (ettr, ettr + 0.02)
    )  # fmt: skip
    return over_rounds([first, second])


def comparison(*rows: RowResult) -> Comparison:
    conditions = Conditions(
        HARDWARE, [1.0, 2.0], 10, [1.0], 0.001, 0.02, True, 4, [PlannedFault(4.5, Kind.KILL, 2)]
    )
    return Comparison(conditions, {row.title: row for row in rows}, {'none': 'why'})


def test_only_a_broken_promise_fails() -> None:
    assert comparison(results(0.5, [])).exact
    assert comparison(results(0.5, ['experts'], 'torch-dist-sync')).exact
    assert not comparison(results(0.5, ['experts'])).exact


# ---- picture


def test_iterations_that_were_trained_again_count_for_nothing() -> None:
    curves = measuring.curves(RESTARTED)
    found = goodput(curves, 1.0, 2.0)
    # Iterations 1 to 3 end at 0, 1, 2 s; 4 to 10 at 8 to 14 s.
    assert found.tolist() == [1.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]
    assert curves.faults == [(4.5, 'kill')]


def test_table_of_the_page_is_that_of_its_file() -> None:
    docs = ROOT / 'docs'
    found = msgspec.json.decode((docs / 'measurements/compare.json').read_bytes(), type=Comparison)
    assert markdown(found) in (docs / 'comparison.md').read_text('utf-8')
