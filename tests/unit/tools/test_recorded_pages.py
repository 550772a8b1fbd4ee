# SPDX-License-Identifier: Apache-2.0
"""What `status` and `report` show of the runs in `runs.py` is what was recorded.

After an intended change: `python -m tests.unit.tools.test_recorded_pages`, and read the difference.
"""

import re
from pathlib import Path

import pytest
from rich.console import Console

from moevement_ext.events import Event, ProtectionReduced
from tests.unit.tools.runs import localized_run, resharded_run, restarted_run, started_over
from tests.unit.tools.samples import event
from tools.lab.history import History
from tools.report.__main__ import render
from tools.status import show

RECORDED = Path(__file__).with_name('recorded_pages.txt')
REDUCED = event(ProtectionReduced, 3, 9.0, reason='<peer> is slow')
RUNS = {
    'just begun': [one for one in localized_run() if one.time < 2],
    'localized': localized_run(),
    'restarted': sorted([*restarted_run(), REDUCED], key=lambda one: one.time),
    'in another layout': resharded_run(),
    'started over': started_over(),
}
SCREENS = {
    f'{name} at {now:.1f} s': (events, now)
    for name, events in [*RUNS.items()][1:]
    for now in (1.5, 3.0, 9.5, 14.5, 23.0, 99.0)
}


def screen(events: list[Event], now: float) -> str:
    console = Console(width=100, force_terminal=False)
    with console.capture() as capture:
        console.print(show(History([one for one in events if one.time < now]), now))
    local_time = r'\d\d-\d\d \d\d:\d\d:\d\d'
    return re.sub(r' +\n', '\n', re.sub(local_time, 'MM-DD hh:mm:ss', capture.get()))


def page(events: list[Event]) -> str:
    html = render(History(events), 'run')
    text = re.sub(r'<style>.*?</style>|<svg.*?</svg>', '', html, flags=re.S)
    return re.sub(r'\s*\n\s*', '\n', re.sub(r'<[^>]+>', ' ', text)).strip() + '\n'


def shown(title: str) -> str:
    return page(RUNS[title]) if title in RUNS else screen(*SCREENS[title])


def recorded() -> dict[str, str]:
    parts = re.split(r'^==== (.*)\n', RECORDED.read_text('utf-8'), flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize('title', [*RUNS, *SCREENS])
def test_run_is_shown_as_recorded(title: str) -> None:
    assert shown(title) == recorded()[title]


if __name__ == '__main__':
    RECORDED.write_text(''.join(f'==== {one}\n{shown(one)}' for one in (*RUNS, *SCREENS)), 'utf-8')
