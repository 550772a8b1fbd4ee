# SPDX-License-Identifier: Apache-2.0
"""A running job in the terminal."""

import re

import msgspec
import pytest
from rich.console import Console

from moevement_ext.events import Event, Protected, RecoveryPhase, WindowCommitted
from tests.unit.tools.runs import LOST, localized_run
from tests.unit.tools.samples import event
from tools.lab.activity import Doing
from tools.lab.history import History
from tools.status import missing, show, silent


def until(seconds: float) -> list[Event]:
    return [one for one in localized_run() if one.time < seconds]


def shown(events: list[Event], now: float) -> str:
    console = Console(width=160, force_terminal=False)
    with console.capture() as capture:
        console.print(show(History(events), now))
    return ' '.join(re.sub(r'[│┃━─┏┓┡┩└┘┳┴╇┼]', ' ', capture.get()).split())


def on(node: str, one: Event) -> Event:
    """The same, if it is of the second process of the lost rank, on another node."""
    moved = isinstance(one, Protected) and (one.rank, one.time > 5.0) == (LOST, True)
    return msgspec.structs.replace(one, node=node) if moved else one


def test_guests_are_shown_with_their_time() -> None:
    said = 'nodes 3 of 4 nodes; rank 2 is a guest of node0 since '
    assert re.search(said + r'\d\d-\d\d \d\d:', shown([on('node0', x) for x in until(22.0)], 22.0))
    for home in ('node2', 'node9'):
        assert ' is a guest of ' not in shown([on(home, x) for x in until(22.0)], 22.0)


def test_lost_rank_is_not_shown_as_training() -> None:
    """Others have noticed it, and its new process has written nothing yet."""
    result = event(RecoveryPhase, 0, 10.9, pid=10, iteration=8, phase='meet')
    doing = History([*until(11.0), result]).doing
    assert (doing[2], doing[3]) == (Doing.STARTING, Doing.WAITING)


@pytest.mark.parametrize(
    ('last', 'quiet_s', 'colour', 'said'),
    [
        (22.0, 50.0, '32', 'training, iteration 14 of 18, last event'),
        (22.0, 100.0, '33', 'NO HEARTBEAT for 1 min 41 s; before that: training, iteration 14'),
        (22.0, 7200.0, '31', 'NO HEARTBEAT for 2 h 00 min; before that: training'),
        (14.0, 500.0, '33', 'RECOVERING for 8 min 2'),
        (14.0, 7200.0, '31', 'NO HEARTBEAT for 2 h 00 min; before that: RECOVERING for 2 h'),
        (1.5, 7200.0, '31', 'NO HEARTBEAT for 2 h 00 min; before that: starting'),
    ],
)
def test_a_job_that_writes_nothing_is_shown_as_silent(
    last: float, quiet_s: float, colour: str, said: str
) -> None:
    """Windows last 2 s; a recovery and a start may be silent for longer than training."""
    console = Console(width=200, force_terminal=True, color_system='standard')
    with console.capture() as capture:
        console.print(show(History(until(last)), last + quiet_s))
    assert capture.get().startswith(f'\x1b[1;{colour}m{said}')


def test_silent_and_missing_ranks() -> None:
    events = [one for one in localized_run(finished=False) if one.rank != 1 or one.time < 18]
    assert silent(History(events)) == [1]
    assert silent(History(localized_run(finished=False))) == []
    # Of windows shorter than a second, each rank writes one at a time of its own.
    short = [
        msgspec.structs.replace(one, training_s=one.training_s / 100)
        if isinstance(one, WindowCommitted) else one
        for one in events
    ]  # fmt: skip
    assert silent(History(short)) == []
    assert missing(History([one for one in localized_run() if one.rank != 1])) == [1]
    assert 'MISSING ranks 1' in shown([one for one in localized_run() if one.rank != 1], 30.0)
