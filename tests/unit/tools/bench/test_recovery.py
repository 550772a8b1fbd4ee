# SPDX-License-Identifier: Apache-2.0
"""How a job came back: phases out of logs and events; what the benchmark takes for a recovery."""

from datetime import timedelta

import pytest

from moevement_ext.events import Event, FailureDetected, Recovered, WorkerStarted
from tests.unit.tools.runs import starts, trains
from tests.unit.tools.samples import CONVERTED, START, event, iteration_line, logged
from tools.bench import recovery
from tools.bench.comeback import PHASES, comeback, kept, stage_iterations
from tools.bench.recovery import recovered
from tools.lab.programs import LabError
from tools.lab.run_log import RunLog, parse_log

KILLED_AT = (START + timedelta(seconds=5)).timestamp()


def log_of(*iterations: tuple[int, float] | str) -> RunLog:
    """Of pairs of number and seconds, and of other lines."""
    lines = (item if isinstance(item, str) else iteration_line(*item) for item in iterations)
    return parse_log(''.join(lines))


# A whole job


def test_phases_of_a_dense_recovery_add_up() -> None:
    log = log_of((4, 4.0), (5, 5.0), (3, 15.5), (4, 16.5), (5, 17.5), (6, 18.5))
    found = recovered(log, KILLED_AT, [], [], dense=True)
    assert found.seconds == pytest.approx(13.5)
    assert found.away_s is None
    assert found.phases == pytest.approx(dict(zip(PHASES, (0.0, 10.0, 2.5, 1.0), strict=True)))
    assert found.stage_iterations == 3 * recovery.STAGES


def sparse_events() -> list[Event]:
    """The last rank is slower."""
    seconds = {'find': 0.5, 'convert': 2.0, 'catch_up': 1.0, 'fetch': 0.0}
    last = recovery.STAGES - 1
    return [
        *(
            one
            for rank in range(last + 1)
            for one in (*starts(rank, KILLED_AT - 9, 10), *trains(rank, 10, KILLED_AT - 6, 0, 4))
        ),
        *(event(WorkerStarted, rank, KILLED_AT + 4 + rank / 3) for rank in range(last + 1)),
        *(
            event(Recovered, rank, KILLED_AT + 11 + rank / 3, replayed=3, seconds=seconds)
            for rank in range(last + 1)
        ),
    ]


BACK = log_of((4, 4.0), (5, 5.0), CONVERTED, (5, 17.8), (6, 19.0))


def test_phases_of_a_sparse_recovery_add_up() -> None:
    noticed = [event(FailureDetected, 0, KILLED_AT + after, reason='gone') for after in (0.5, 0.2)]
    events = sorted([*sparse_events(), *noticed], key=lambda one: one.time)
    found = recovered(BACK, KILLED_AT, events, ['rng'], dense=False)
    assert found.seconds == pytest.approx(14.0) and found.different == ['rng']
    assert found.away_s == pytest.approx(11.8), 'from when the first noticed it'
    expected = dict(zip(PHASES, (5.0, 7.0, 0.8, 1.2), strict=True))
    assert found.phases == pytest.approx(
        expected | {'find': 0.5, 'convert': 2.0, 'catch up': 1.0, 'noticed': 0.2}
    )
    assert found.stage_iterations == 4 * recovery.STAGES, 'three replayed, and one more'


# A fault among others


ROLLED_BACK = logged(
    (1, 1), (2, 2), (3, 3), (4, 4), (5, 5),  # at 5.5 all is killed, the newest checkpoint is of 3
    (9, 4), (10, 5), (11, 6), (12, 7),
)  # fmt: skip


def test_phases_of_a_restart_follow_the_log() -> None:
    back = comeback(ROLLED_BACK, [], [0.0, 0.5, 7.5], 5.5)
    assert back.seconds == 5.5, 'iteration 6 is the first that was not there'
    assert back.phases == dict(zip(PHASES, (2.0, 1.0, 1.5, 1.0), strict=True))
    assert stage_iterations(ROLLED_BACK, [], 2) == 4.0, 'two iterations on two stages'
    assert [item.time for item in kept(ROLLED_BACK)] == [1, 2, 3, 9, 10, 11, 12]
    assert comeback(ROLLED_BACK, [], [7.5], 5.5, end=7.0).phases[PHASES[0]] == 0.0
    with pytest.raises(LabError, match='never got beyond iteration 7'):
        comeback(ROLLED_BACK, [], [], 12.5)
