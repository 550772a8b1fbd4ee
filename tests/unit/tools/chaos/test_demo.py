# SPDX-License-Identifier: Apache-2.0
"""The demo: what it demands of the events of a localized recovery, and what it reports of them."""

import io
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from moevement_ext.events import (
    Event,
    FailureDetected,
    NextTier,
    Recovered,
    RecoveryStarted,
    WorkerStarted,
)
from tests.unit.tools.samples import event
from tools.chaos import demo_summary
from tools.chaos.demo_summary import PHASES, CapturedBytes, LocalizedRecovery, Result
from tools.demo import parse_arguments
from tools.lab.digests import StateDigest
from tools.lab.errors import LabError
from tools.lab.four_ranks import STAGE_RANKS, WORKERS_PER_NODE, WORLD_SIZE, training_flags
from tools.lab.plots import Doing
from tools.lab.run_log import Iteration, RunLog
from tools.lab.trained import Trained

KILLED_AT = 100.0
LOST = 0
Events = list[Event]


def recovered(rank: int, time: float) -> Event:
    replays = rank in STAGE_RANKS[LOST]
    seconds = dict.fromkeys(PHASES, 0.0)
    seconds |= {'convert': 2.0 + rank, 'catch_up': 1.0} if replays else {'unblock': 0.1 + rank}
    fields: Any = {'scope': 'localized', 'stages': [LOST], 'replacements': list(STAGE_RANKS[LOST])}
    fields |= {'target': 28, 'seconds': seconds}
    pid = 100 * replays + rank
    return event(Recovered, rank, time, pid=pid, replayed=10 if replays else 0, **fields)


def good_events() -> Events:
    """Killed at 100, noticed by 101, replay from 110 on, back by 116."""
    found = []
    for rank in range(WORLD_SIZE):
        found.append(event(WorkerStarted, rank, 50.0, pid=rank))
        if rank in STAGE_RANKS[LOST]:
            pid = 100 + rank
            found.append(event(WorkerStarted, rank, 106.0, pid=pid))
            found.append(event(RecoveryStarted, rank, 109.0 + rank, pid=pid, start=18, dense_at=23))
        else:
            found.append(event(FailureDetected, rank, 98.7 + rank, pid=rank, reason='gone'))
        found.append(recovered(rank, 115.7 + rank / 10))
    return sorted(found, key=lambda item: item.time)


def logged(*pairs: tuple[int, float]) -> list[Iteration]:
    return [Iteration(time, number, 500.0, 5.0 - number / 100) for number, time in pairs]


def good_log() -> RunLog:
    """The last rank logs iteration 28 before the kill and 29 at 117."""
    numbers = [(number, 72.0 + number) for number in range(1, 29)]
    return RunLog([logged(*numbers, (29, 117.0), (30, 117.5))], [])


def disturbed(events: Events, log: RunLog | None = None, digest: str = 'a' * 64) -> Trained:
    return Trained(log or good_log(), StateDigest(digest, 30, {}), events, KILLED_AT)


def check(events: Events, log: RunLog | None = None) -> LocalizedRecovery:
    return demo_summary.localized_recovery(disturbed(events, log), LOST)


def test_each_node_runs_one_stage() -> None:
    assert [rank for ranks in STAGE_RANKS for rank in ranks] == list(range(WORLD_SIZE))
    assert {len(ranks) for ranks in STAGE_RANKS} == {WORKERS_PER_NODE}
    flags = training_flags(Path('data'), 40)
    assert flags[flags.index('--pipeline-model-parallel-size') + 1] == str(len(STAGE_RANKS))


# A localized recovery


def test_stages_report_replay_and_slowest_phases() -> None:
    found = check(good_events())
    assert found.replayed == [10, 0]
    lost, kept = found.phases
    assert lost['convert'] == pytest.approx(3.0)
    assert kept['unblock'] == pytest.approx(3.1)
    assert list(kept) == list(PHASES)


def test_seconds_are_from_the_kill_to_the_first_new_iteration() -> None:
    found = check(good_events())
    assert found.new.number == 29
    assert found.seconds == pytest.approx(17.0)


def test_an_iteration_that_survivors_still_committed_is_not_new() -> None:
    """The kill came while iteration 28 was being logged."""
    numbers = [(number, 72.0 + number) for number in range(1, 28)]
    log = RunLog([logged(*numbers, (28, 100.3), (29, 117.0))], [])
    assert check(good_events(), log).new.number == 29


def without(kind: type[Event], rank: int) -> Events:
    return [e for e in good_events() if (type(e), e.rank) != (kind, rank)]


def with_event(kind: type[Event], rank: int, time: float, **fields: Any) -> Events:
    added = [*good_events(), event(kind, rank, time, **fields)]
    return sorted(added, key=lambda item: item.time)


def with_field(rank: int, **fields: Any) -> Events:
    return [
        replace(e, **fields) if (type(e), e.rank) == (Recovered, rank) else e for e in good_events()
    ]


@pytest.mark.parametrize(
    ('events', 'complaint'),
    [
        (with_field(0, replacements=[0, 1, 2]), r'new processes of ranks \[0, 1, 2\]'),
        (without(Recovered, 3), 'recoveries by rank'),
        (with_field(0, stages=[0, 1]), r'stages \[0, 1\]'),
        (with_field(0, scope='whole job'), 'whole job, stages'),
        (with_field(1, differing=['layers.1']), 'operators differ, such as rank 1: layers.1'),
        (
            with_event(NextTier, 2, 103.0, pid=2, reason='no log', tier='the whole job'),
            'from the whole job: no log',
        ),
    ],
)
def test_anything_but_a_localized_recovery_is_refused(events: Events, complaint: str) -> None:
    with pytest.raises(LabError, match=f'not localized: .*{complaint}'):
        check(events)


def test_log_of_the_last_rank_has_one_attempt() -> None:
    attempts = [logged((27, 99.0), (28, 99.9)), logged((29, 117.0))]
    with pytest.raises(LabError, match='not localized'):
        check(good_events(), RunLog(attempts, []))


def test_job_without_a_new_iteration_is_refused() -> None:
    with pytest.raises(LabError, match='never got beyond iteration 28'):
        check(good_events(), RunLog([logged((28, 99.9))], []))


def test_job_has_recovered_when_every_rank_reports_it() -> None:
    assert demo_summary.all_recovered(good_events())
    assert not demo_summary.all_recovered(without(Recovered, 1))


# The strip of the picture


def test_lanes_follow_each_other_without_gaps() -> None:
    events = good_events()
    story = demo_summary.story(disturbed(events), check(events))
    lost, kept = story.lanes.values()
    assert [(span.doing, span.start, span.end) for span in lost] == [
        (Doing.TRAINING, 72.5, 100.0),
        (Doing.STARTING, 100.0, 110.0),
        (Doing.REPLAYING, 110.0, pytest.approx(115.8)),
        (Doing.TRAINING, pytest.approx(115.8), 117.5),
    ]
    assert [(span.doing, span.start, span.end) for span in kept] == [
        (Doing.TRAINING, 72.5, pytest.approx(100.7)),
        (Doing.WAITING, pytest.approx(100.7), pytest.approx(116.0)),
        (Doing.TRAINING, pytest.approx(116.0), 117.5),
    ]
    assert (story.before.number, story.after.number) == (28, 29)


# Reports


def result(log: RunLog | None = None, digest: str = 'a' * 64) -> Result:
    """Without sparse checkpointing 400 ms an iteration, with it 500 ms before the failure."""
    slower = [item._replace(elapsed_ms=400.0) for item in good_log().iterations]
    plain = Trained(RunLog([slower], []), StateDigest('a' * 64, 30, {}), [])
    captured = {rank: CapturedBytes([60, 40], 100) for rank in range(WORLD_SIZE)}
    return demo_summary.result(plain, disturbed(good_events(), log, digest), captured, LOST)


def test_the_last_line_keeps_its_format() -> None:
    assert result().line() == (
        'demo: bit_identical=true replayed=10 recovery_s=17.0 (starting processes 10.0, '
        'replaying 5.8) overhead=1.250 slot_over_dense=0.500'
    )


def test_different_final_state_is_reported() -> None:
    found = result(digest='b' * 64)
    assert not found.bit_identical
    assert found.line().startswith('demo: bit_identical=false ')


def test_overhead_counts_iterations_before_the_failure_only() -> None:
    slow = [item._replace(elapsed_ms=9000.0) for item in good_log().iterations]
    log = RunLog([[*good_log().iterations[:28], *slow[28:], *slow[28:], *slow[28:] * 20]], [])
    assert result(log).iteration_ms == (400.0, 500.0)


def test_tables_name_stages_and_phases() -> None:
    console = Console(file=io.StringIO(), width=120)
    demo_summary.print_summary(result(), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in (
        '10 (stage 0), 0 (stage 1)',
        'stage 0 (lost)',
        'stage 1 (kept its state)',
        'digest of the final state',
        'bytes a checkpoint',
        'median iteration (ms)',
    ):
        assert part in text
    for name in ('unblock', 'respawn', 'regroup', 'fetch', 'convert', 'catch up'):
        assert f'{name} (s)' in text


@pytest.mark.parametrize(
    'flags', [['--window', '0'], ['--kill-after', '11'], ['--iterations', '29']]
)
def test_wrong_flags_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        parse_arguments(flags)
    assert refused.value.code == 2
