# SPDX-License-Identifier: Apache-2.0
"""A running job in the terminal, for scripts and on a page: is it well?"""

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import msgspec
import pytest
from rich.console import Console

from moevement_ext.events import (
    Event,
    Protected,
    RecoveryPhase,
    SlowRank,
    WindowCommitted,
    WindowPersisted,
    WorkerStarted,
)
from tests.unit.tools.runs import LOST, localized_run, write
from tests.unit.tools.samples import event
from tools import status
from tools.lab.activity import Doing
from tools.lab.history import History
from tools.report.__main__ import main as report
from tools.report.__main__ import render
from tools.status import missing, show, silent

ROOT = Path(__file__).resolve().parents[4]
RUN = localized_run(finished=False)


# Iterations of a quarter of a second: a rank is silent before the newest window is old.
FAST = [
    msgspec.structs.replace(one, training_s=one.training_s / 3.9)
    if isinstance(one, WindowCommitted) else one
    for one in RUN
]  # fmt: skip


def until(seconds: float, *without: int) -> list[Event]:
    return [one for one in localized_run() if one.time < seconds and one.rank not in without]


@pytest.mark.parametrize(
    ('events', 'quiet_s', 'expected'),
    [
        (until(22.0), 1.0, 0),
        (until(22.0), 100.0, 1),
        (until(22.0), 7200.0, 2),
        (until(14.0), 1.0, 1),
        (until(14.0), 7200.0, 2),
        (until(1.5), 1.0, 0),
        (until(22.0, 1), 1.0, 1),
        ([one for one in FAST if one.rank != 1 or one.time < 18], 1.0, 1),
        ([one for one in RUN if not isinstance(one, WindowPersisted)], 1.0, 1),
        ([one for one in RUN if not isinstance(one, WindowPersisted) or one.time < 12], 1.0, 1),
        (localized_run(), 7200.0, 0),
    ],
    ids=['trains', 'quiet', 'dead', 'recovers', 'recovers for hours', 'starts', 'rank missing',
         'rank silent', 'no window', 'old window', 'finished'],
)  # fmt: skip
def test_health(events: list[Event], quiet_s: float, expected: int) -> None:
    history = History(events)
    assert status.health(history, history.end + quiet_s) == expected


def moved(events: list[Event], until: float) -> list[Event]:
    """The same, but the last event is of the given time."""
    shift = until - events[-1].time
    return [msgspec.structs.replace(one, time=one.time + shift) for one in events]


def test_status_of_the_exit_is_the_health(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, events, expected in (('a', until(22.0), 0), ('b', until(14.0), 1), ('c', RUN, 2)):
        write(tmp_path / name, moved(events, time.time() - 7200.0 * (expected == 2)))
        assert status.main([str(tmp_path / name), '--once']) == expected
        assert status.main([str(tmp_path / name), '--json']) == expected
    capsys.readouterr()
    assert status.main([str(tmp_path / 'c'), '--json']) == 2
    found = json.loads(capsys.readouterr().out)
    assert (found['health'], found['iteration'], found['newest_window']) == ('dead', 18, 16)
    assert [one['replaced'] for one in found['failures']] == [[2]]
    assert report([str(tmp_path / 'c'), '--json']) == 0
    assert json.loads(capsys.readouterr().out) == found


def told(slow: int, time: float, ratio: float, iterations: int, at: int = 40) -> Event:
    return SlowRank(rank=0, time=time, iteration=at, slow=slow, node='n3', ratio=ratio,
                    iterations=iterations)  # fmt: skip


RESTARTED = WorkerStarted(rank=0, time=21.3, start_up_s=0.5)


@pytest.mark.parametrize(
    ('events', 'expected'),
    [
        ([told(1, 21.0, 1.31, 40)], 'rank 1 on n3, 1.31 times the median of its stage for '),
        ([told(1, 21.0, 1.31, 40), told(0, 21.1, 1.5, 60)], '1 more are slow'),
        ([told(1, 21.0, 1.31, 40), told(1, 21.1, 1.02, 0)], None),
        ([told(1, 21.0, 1.31, 40), RESTARTED], None),
        ([RESTARTED, told(1, 21.5, 1.31, 40)], 'rank 1 on n3'),
    ],
    ids=['slow', 'two', 'no more', 'the judge is new', 'told by the new one'],
)
def test_slowest_rank_is_shown_while_it_is_slow(events: list[Event], expected: str | None) -> None:
    history = History([*until(21.0), *events])
    console = Console(width=120)
    with console.capture() as capture:
        console.print(status.show(history, history.end))
    shown = capture.get()
    assert ('slowest' in shown) is (expected is not None)
    assert expected is None or expected in shown
    assert len(status.summary(history, history.end)['slow']) == len(history.slow)
    page = render(history, 'a run')
    assert 'iteration 40: rank 1 on n3, 1.31 times' in page
    assert ('slow no more' in page) is (events[-1] == told(1, 21.1, 1.02, 0))


def test_shares_of_work_and_waits_are_told() -> None:
    figures = {'plan': 'a', 'slots': [1], 'exposed_s': 0.0, 'copy_bytes_per_s': None,
               'send_bytes_per_s': None, 'helpers_s': 0.0}  # fmt: skip
    told = WindowCommitted(
        time=1.0, rank=1, start=0, training_s=10.0, own_s=6.0, waits_s={'0': 3.0, 'group': 1.0},
        **figures,
    )  # fmt: skip
    assert History([told]).work == {1: {'own': 0.6, '0': 0.3, 'group': 0.1}}


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Its address."""
    command = [sys.executable, '-m', 'tools.status', str(folder), '--serve', '0']
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.kill()


def test_the_screen_is_served_to_this_machine(tmp_path: Path) -> None:
    with served(tmp_path) as address:
        assert address.startswith('http://127.0.0.1:')
        pages = []
        for events in ([], until(12.0)):
            write(tmp_path, events)
            with urlopen(address, timeout=60) as page:
                assert page.headers['Refresh'] == '2'
                pages.append(re.sub('<[^>]+>', '', page.read().decode()))
        (tmp_path / 'rank0.jsonl').write_text('nothing\n')
        with urlopen(address, timeout=60) as page:
            assert 'holds something else than events' in page.read().decode()
    assert 'no events yet' in pages[0]
    assert 'NO HEARTBEAT' in pages[1] and 'Newest of 1 failures' in pages[1]


@pytest.mark.thorough
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    """By the command of docs/observe.md."""
    page = (ROOT / 'docs' / 'observe.md').read_text('utf-8')
    (command,) = re.findall(r'^ *(chromium (?:.*\\\n)*.*)$', page, re.M)
    if shutil.which('chromium') is None:
        pytest.skip('no chromium: apt-get install chromium')
    write(tmp_path, until(22.0))
    with served(tmp_path) as address:
        browse = shlex.split(command.replace('\\\n', ''))
        *browse, _ = [one for one in browse if not one.startswith('--screenshot')]
        done = subprocess.run([*browse, '--dump-dom', address], capture_output=True, text=True)
        text = re.sub('<[^>]+>', '', done.stdout)
        assert 'NO HEARTBEAT' in text and 'Newest of 1 failures' in text, done.stderr
        picture = tmp_path / 'page.png'
        subprocess.run([*browse, f'--screenshot={picture}', address], check=True)
        assert picture.stat().st_size > 10_000, 'a blank page is smaller'


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
