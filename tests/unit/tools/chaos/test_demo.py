# SPDX-License-Identifier: Apache-2.0
"""The demo: what it demands of the events of a localized recovery, and what it reports of them."""

import io
import operator
import re
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from moevement_ext.events import (
    Event,
    FailureDetected,
    Finished,
    Protected,
    Recovered,
    RecoveryStarted,
    WindowCommitted,
    WorkerStarted,
)
from tests.unit.tools.samples import event
from tools.demo import LOST, result
from tools.lab.digests import StateDigest
from tools.lab.history import History
from tools.lab.job import Trained
from tools.lab.presets import STAGE_RANKS, WORLD_SIZE
from tools.lab.programs import LabError
from tools.lab.run_log import Iteration, RunLog
from tools.report.__main__ import render
from tools.status import failure_table

KILLED_AT = 100.0
Events = list[Event]
BY_TIME = operator.attrgetter('time')
PLACE: dict[str, Any] = {
    'node': 'n', 'world_size': WORLD_SIZE, 'copies': 1, 'replicas': 1, 'window': 2,
    'host_memory': {}, 'experts': [], 'operators': {'a': (60, 10), 'b': (40, 10)},
}  # fmt: skip
WINDOW: dict[str, Any] = {
    'start': 1, 'plan': 'a', 'slots': [60, 40], 'training_s': 1.0, 'exposed_s': 0.0,
    'copy_bytes_per_s': None, 'send_bytes_per_s': None,
}  # fmt: skip


def good_events() -> Events:
    """Killed at 100, noticed by 101, replay from 110 on, back by 116."""
    found = []
    for rank in range(WORLD_SIZE):
        lost = rank in STAGE_RANKS[LOST]
        stage, pid = int(not lost), 100 * lost + rank
        found.append(event(WorkerStarted, rank, 50.0, pid=rank))
        found.append(event(Protected, rank, 60.0, pid=rank, stage=stage, **PLACE))
        found.append(event(WindowCommitted, rank, 90.0, pid=rank, iteration=18, **WINDOW))
        later = WINDOW | {'start': 18, 'training_s': 3.0, 'exposed_s': 0.4}
        found.append(event(WindowCommitted, rank, 95.0, pid=rank, iteration=22, **later))
        if lost:
            found.append(event(WorkerStarted, rank, 106.0, pid=pid))
            found.append(event(RecoveryStarted, rank, 109.0 + rank, pid=pid, start=18, dense_at=23))
        else:
            found.append(event(FailureDetected, rank, 98.7 + rank, pid=rank, reason='gone'))
        found.append(
            event(Recovered, rank, 115.7 + rank / 10, pid=pid, replayed=10 * lost, target=28,
                  scope='localized', stages=[LOST])
        )  # fmt: skip
        found.append(event(Finished, rank, 130.0, pid=pid, removed=True))
    return sorted(found, key=BY_TIME)


def logged(*pairs: tuple[int, float]) -> list[Iteration]:
    return [Iteration(time, number, 500.0, 5.0 - number / 100) for number, time in pairs]


TO_28 = [(number, 72.0 + number) for number in range(1, 29)]
GOOD = logged(*TO_28, (29, 117.0), (30, 117.5))
"""The last rank logs iteration 28 before the kill and 29 at 117."""


def recovered(
    events: Events | None = None, *attempts: list[Iteration], digest: str = 'a' * 64
) -> Trained:
    log = RunLog(list(attempts) or [GOOD], [])
    return Trained(log, StateDigest(digest, 30, {}), events or good_events(), KILLED_AT)


def compared(disturbed: Trained, *loads: float) -> str:
    plain = Trained(RunLog([GOOD], []), StateDigest('a' * 64, 30, {}), [])
    identical, line = result(plain, disturbed, loads or (3.0, 4.0))
    assert f'bit_identical={str(identical).lower()} ' in line
    return line


def test_the_last_line_keeps_its_format() -> None:
    assert compared(recovered()) == (
        'demo: bit_identical=true replayed=10 recovery_s=15.3 (starting processes 9.3, '
        'replaying 5.8) overhead=1.250 slot_over_dense=0.500 load=3.0,4.0'
    )
    assert ' overhead=unknown ' in compared(recovered(), 1.0, 9.0)
    different = compared(recovered(digest='b' * 64))
    assert different.startswith('demo: bit_identical=false ')


def test_page_shows_the_figures_of_the_last_line() -> None:
    """And the table below the demo, which is that of `status`."""
    history = History(good_events())
    page = ' '.join(re.sub('<[^>]*>', ' ', render(history, 'a run')).split())
    assert 'overhead of checkpointing 1.250' in page and '15.3 s away, median' in page
    console = Console(file=io.StringIO(), width=120)
    console.print(failure_table(history, 130.0))
    assert '15.3 s' in console.file.getvalue()


def with_field(rank: int, **fields: Any) -> Events:
    return [
        replace(e, **fields) if (type(e), e.rank) == (Recovered, rank) else e for e in good_events()
    ]


@pytest.mark.parametrize(
    ('disturbed', 'complaint'),
    [
        (recovered(sorted([*good_events(), event(WorkerStarted, 2, 106.0, pid=9)], key=BY_TIME)),
         r'new processes of ranks \[0, 1, 2\]'),
        (recovered(with_field(0, stages=[0, 1])), r'stages \[0, 1\]'),
        (recovered(with_field(0, scope='whole job')), 'whole job, stages'),
        (recovered(with_field(1, differing=['layers.1'])), 'operators differ, such as rank 1: lay'),
        (recovered(None, logged(*TO_28), logged((29, 117.0))), 'had 2 attempts'),
    ],
)  # fmt: skip
def test_anything_but_a_localized_recovery_is_refused(disturbed: Trained, complaint: str) -> None:
    with pytest.raises(LabError, match=f'not localized: .*{complaint}'):
        compared(disturbed)
