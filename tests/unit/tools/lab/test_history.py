# SPDX-License-Identifier: Apache-2.0
"""What became of a run, read out of its events."""

import msgspec
import pytest

from moevement_ext.events import Event, FailureDetected, Finished, Recovered, RecoveryStarted
from tests.unit.tools.runs import LOST, RANKS, localized_run, restarted_run, starts, trains
from tests.unit.tools.samples import event
from tools.lab.activity import Doing
from tools.lab.history import History, shares

TRAINING, WAITING, STARTING, REPLAYING = (
    Doing.TRAINING, Doing.WAITING, Doing.STARTING, Doing.REPLAYING,
)  # fmt: skip


def test_restart_of_the_whole_job_is_one_episode() -> None:
    history = History(restarted_run())
    assert history.spans[0] == [
        (STARTING, 0.0, 2.0), (TRAINING, 2.0, 11.0), (STARTING, 11.0, 12.5),
        (REPLAYING, 12.5, 15.0), (TRAINING, 15.0, 26.0),
    ]  # fmt: skip
    [episode] = history.episodes
    assert (episode.start, episode.end, episode.scope) == (11.0, 15.0, 'whole job')
    assert episode.replaced == [0, 1, 2, 3]
    assert episode.differing == [(3, 'layer1.router')]


def test_no_rank_trains_while_all_workers_are_dead() -> None:
    """It was launched again after two hours; the next window would have come after 2 s."""
    gone_s = 7200.0
    events = [
        msgspec.structs.replace(one, time=one.time + gone_s * (one.time > 10.9))
        for one in restarted_run()
    ]
    history = History(events)
    assert history.spans[0] == [
        (STARTING, 0.0, 2.0), (TRAINING, 2.0, 12.25), (STARTING, 12.25, 12.5 + gone_s),
        (REPLAYING, 12.5 + gone_s, 15.0 + gone_s), (TRAINING, 15.0 + gone_s, 26.0 + gone_s),
    ]  # fmt: skip
    found = shares(history)
    assert found is not None
    assert found.recovering == pytest.approx(2.75 + gone_s)
    assert found.other < 10


def test_a_hot_spare_is_not_a_process_that_started_before_the_failure() -> None:
    spare = starts(LOST, 1.0, 99, start_up_s=10.0)  # it waited; its program began at 11 s
    events = [one for one in localized_run() if one.time < 11 and one.pid != 99]
    spans = History([*events, *spare]).spans[LOST]
    assert spans == [(STARTING, 0.0, 2.0), (TRAINING, 2.0, 10.5), (STARTING, 10.5, 12.0)]


def planned_stop() -> History:
    """A job that ends at 10.5 s to go on two days later, and takes 5 s until it trains again."""
    found: list[Event] = []
    again = 172_800.0
    for rank in RANKS:
        found += [*starts(rank, 0.0, 10 + rank), *trains(rank, 10 + rank, 2.0, 0, 8)]
        pid = 50 + rank
        started, protected = starts(rank, again, pid)
        found += [
            event(Finished, rank, 10.5, pid=10 + rank, iteration=8, removed=False),
            started,
            event(FailureDetected, rank, again + 1.2, pid=pid, committed=8, windows=1),
            event(RecoveryStarted, rank, again + 1.5, pid=pid, start=6, dense_at=7),
            protected,
            event(Recovered, rank, again + 5, pid=pid, iteration=8, replayed=0, verified=2,
                  verified_at=7, differing=[], seconds={}),
            *trains(rank, pid, again + 5, 8, 18),
            event(Finished, rank, again + 15.5, pid=pid, iteration=18, removed=True),
        ]  # fmt: skip
    return History(sorted(found, key=lambda one: one.time))


def test_planned_stop_is_no_failure() -> None:
    history = planned_stop()
    assert (history.episodes, history.mtbf_s) == ([], None)
    time = shares(history)
    assert time is not None
    assert time.wall == pytest.approx(26.0)
    assert (time.recovering, time.starting) == (0, pytest.approx(7.0))


@pytest.mark.parametrize('ahead_s', [-5.0, 5.0])
def test_one_failure_is_one_episode_though_clocks_differ(ahead_s: float) -> None:
    moved = [
        msgspec.structs.replace(one, time=one.time + ahead_s) if one.rank == LOST else one
        for one in localized_run()
    ]
    history = History(sorted(moved, key=lambda one: one.time))
    (episode,) = history.episodes
    assert episode.verified == 6


def test_a_second_failure_in_a_recovery_belongs_to_the_first() -> None:
    second = event(FailureDetected, 0, 14.0, pid=10, iteration=8, reason='rank 3 is gone')
    events = sorted([*localized_run(), second], key=lambda one: one.time)
    [episode] = History(events).episodes
    assert episode.reasons == ['rank 2 (pid 12) was killed by SIGKILL', 'rank 3 is gone']
