# SPDX-License-Identifier: Apache-2.0
"""The page about a run."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.unit.tools.runs import localized_run, write
from tools.report.__main__ import main


def report(tmp_path: Path, *flags: str) -> str:
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
