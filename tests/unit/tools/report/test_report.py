# SPDX-License-Identifier: Apache-2.0
"""The page about a run."""

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from moevement_ext.events import FailureDetected, WorkerStarted
from tests.unit.tools.runs import localized_run, write
from tools.lab.history import Episode, History
from tools.report.__main__ import _headline, main
from tools.report.charts import pace_chart


def report(tmp_path: Path, *flags: str) -> str:
    """The HTML of a page about `events`."""
    target = tmp_path / 'pages' / 'report.html'
    assert main([str(tmp_path / 'events'), '-o', str(target), *flags]) == 0
    return target.read_text('utf-8')


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    write(tmp_path / 'events', localized_run())
    html = report(tmp_path)
    tags = Counter(re.findall(r'<(\w+)', html))
    closed = Counter(re.findall(r'</(\w+)', html)) + Counter(re.findall(r'<(\w+)[^>]*/>', html))
    assert tags - Counter(meta=tags['meta']) == closed
    assert not tags.keys() & {'script', 'link', 'img', 'iframe', 'object'}
    assert re.findall('href="([^"]*)"', html) == ['#recovery1']
    assert not re.search(r'https?:|//|@import|url\(', html)
    assert '@media (prefers-color-scheme: dark)' in html
    styles = html[: html.index('</style>')]
    used = {name for names in re.findall('class="([^"]*)"', html) for name in names.split()}
    assert not [name for name in used - {'folds'} if f'.{name}' not in styles]


def test_no_line_is_drawn_through_an_outage() -> None:
    chart = pace_chart(History(localized_run()))
    assert chart is not None
    before, after = chart.points.removeprefix('M').split(' M')
    assert float(before.split(' L')[-1].split(',')[0]) < 100 * 10.5 / 26
    assert float(after.split(',')[0]) > 100 * 15 / 26
    assert [text for _, text in chart.ticks] == ['0', '500 ms', '1 s']


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['nowhere', '-o', 'x'], 'nowhere: no such folder; give that of --sparse-ckpt-events'),
        (['events', '-o', 'events'], r'--output events: Is a directory'),
    ],
)
def test_mistakes_end_in_one_line(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    write(tmp_path / 'events', localized_run())
    monkeypatch.chdir(tmp_path)
    assert main(flags) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith('report: ') and re.search(message, line)


def test_message_of_gloo_is_no_headline() -> None:
    """The ranks that were replaced are; else the words of a launcher, which saw the death."""
    noticed = 'RuntimeError: [/w/gloo/pair.cc:5] Read error: reset by peer. GLHF!'
    events = [FailureDetected(reason=noticed, rank=0), WorkerStarted(rank=2), WorkerStarted(rank=3)]
    history = SimpleNamespace(places={2: SimpleNamespace(node='n2'), 3: SimpleNamespace(node='n2')})
    found = _headline(history, Episode(0.0, 1.0, events))  # type: ignore[arg-type]
    assert found == 'ranks 2 3 (now on n2) replaced'
    seen = FailureDetected(reason='rank 2 (pid 7) was killed by SIGKILL', rank=0)
    found = _headline(history, Episode(0.0, 1.0, [*events, seen]))  # type: ignore[arg-type]
    assert found == 'rank 2 (pid 7) was killed by SIGKILL'
