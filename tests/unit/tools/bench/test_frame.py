# SPDX-License-Identifier: Apache-2.0
"""Ways that take turns, and what is shown of them; files of earlier runs can still be read."""

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from tests.unit.tools.samples import HARDWARE
from tools.bench.frame import Bench, Figure, Report, markdown
from tools.compare.__main__ import CompareBench
from tools.compare.peers import PeersBench
from tools.lab.figures import Spread
from tools.lab.launch import ROOT
from tools.lab.programs import LabError


class Turns(Bench):
    """Ways that take as many seconds as they are told; a negative number is a failure."""

    PROG = 'moevement bench turns'
    FIGURES = {
        'ratio': Figure('ratio', of=lambda one, first: one / first),
        'half': Figure('half', '.1f', lambda one, _: one / 2 or None, ranged=False),
        'parity': Figure('parity', of=lambda one, _: 'odd' if one % 2 else 'even'),
    }

    def titles(self) -> Mapping[str, str]:
        return {'plain': 'plain', 'other': 'the *other'}

    def run(self, way: str, number: int) -> int:
        seconds: int = self.args.seconds[way][number - 1]
        if seconds < 0:
            raise LabError('it failed')
        return seconds

    def may_fail(self, way: str) -> bool:
        return way == 'other'

    def line(self, one: int) -> str:
        return str(one)

    def different(self, rounds: Any) -> list[str]:
        return ['parity'] if any(one % 2 for found in rounds for one in found.values()) else []


def report_of(plain: list[int], other: list[int]) -> Report:
    args = Namespace(seconds={'plain': plain, 'other': other}, rounds=len(plain))
    bench = Turns(args, Path(), Path())
    return bench.summary(HARDWARE, bench.take_turns(Console(quiet=True)))


def test_ratios_are_taken_within_a_round() -> None:
    found = report_of([2, 4, 8], [4, 6, 8])
    ratio = found.ways['other'].figures['ratio']
    assert (ratio.min, ratio.median, ratio.max) == (1.0, 1.5, 2.0)
    assert found.ways['plain'].figures['ratio'] == Spread(1, 1, 1)
    assert found.settings == {'rounds': 3} and found.exact
    assert 'half' not in report_of([2], [0]).ways['other'].figures, 'None does not count'


def test_others_go_on_where_a_way_fails() -> None:
    found = report_of([2, 4], [-1, 8])
    assert found.ways['other'].figures['ratio'] == Spread(2, 2, 2)
    assert found.notes == ['the *other did not run: it failed']
    assert list(report_of([2], [-1]).ways) == ['plain']
    with pytest.raises(LabError, match='it failed'):
        report_of([-1], [2])


def test_exit_status_shows_whether_runs_are_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, table = tmp_path / 'report.json', tmp_path / 'table.md'
    flags = ['--rounds', '1', '--json', str(target), '--table', str(table)]
    for seconds, status in ((2, 0), (3, 1)):
        found = report_of([2], [seconds])
        monkeypatch.setattr(Turns, 'measure', lambda *_, found=found: found)
        assert Turns.main([*flags, '--output', str(tmp_path)]) == status
        assert json.loads(target.read_text())['different'] == ['parity'] * status
        assert table.read_text() == markdown(found, Turns.FIGURES)


@pytest.mark.parametrize('flag', ['json', 'table'])
def test_nothing_is_measured_for_a_file_that_cannot_be_written(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Turns, 'measure', lambda *_: pytest.fail('runs'))
    (tmp_path / 'file').touch()
    for target in (tmp_path / 'file' / 'report', tmp_path):
        assert Turns.main([f'--{flag}', str(target)]) == 2
        assert f'bench turns: --{flag} {target}: ' in capsys.readouterr().err.replace('\n', '')


@pytest.mark.parametrize(
    ('name', 'bench'), [('compare', CompareBench), ('compare-peers', PeersBench)]
)
def test_table_of_the_page_is_that_of_its_file(name: str, bench: type[Bench]) -> None:
    docs = ROOT / 'docs'
    text = (docs / f'measurements/{name}.json').read_bytes()
    table = markdown(msgspec.json.decode(text, type=Report), bench.FIGURES)
    assert table in (docs / 'comparison.md').read_text('utf-8')
