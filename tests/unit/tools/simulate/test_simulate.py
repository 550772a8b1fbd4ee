# SPDX-License-Identifier: Apache-2.0
"""tools/simulate.py: its answers as JSON, sweeps, and what it says to bad input."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

from tools.simulate import __main__ as simulate
from tools.simulate import sweep

ROOT = Path(__file__).resolve().parents[4]
PROFILE = str(ROOT / 'docs' / 'assets' / 'simulate-profile.json')


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Axes of the pictures that are drawn, in the place of files."""
    found: list[Any] = []

    @contextmanager
    def keep(target: Path, **subplots: Any) -> Iterator[Any]:
        found.append(pyplot.subplots(**subplots)[1])
        yield found[-1]

    monkeypatch.setattr(sweep, 'picture', keep)
    yield found
    pyplot.close('all')


def texts(labels: list[Any]) -> list[str]:
    return [label.get_text() for label in labels]


def test_a_sweep_is_drawn_with_names_and_durations_that_people_use(drawn: list[Any]) -> None:
    argv = ['sweep', '--over', 'mtbf', '--values', '300,305,3600', '--systems', 'gemini,ours']
    assert simulate.main([*argv, '--profile', PROFILE, '--plot', 'picture.png']) == 0
    (axes,) = drawn
    assert texts(axes.get_xticklabels()) == ['5 min', '1 h'], 'one label in the place of two'
    assert texts(axes.get_legend().get_texts()) == ['Gemini', 'this implementation']
    assert axes.get_title(loc='left') == 'ETTR by MTBF'


def test_figures_are_rows_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    command = '--over mtbf --values 300,600 --systems gemini,ours --profile'
    assert simulate.main(['sweep', *command.split(), PROFILE]) == 0
    said = ' '.join(re.sub(r'[^\w.()]', ' ', capsys.readouterr().out).split())
    assert 'MTBF (s) gemini ours 300 0.9175 0.9' in said


def test_a_flag_that_changes_nothing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    argv = 'sweep --over interval --values 1,2 --systems ours --mtbf 600 --profile'
    assert simulate.main([*argv.split(), PROFILE]) == 0
    assert '--over interval changes nothing for ours' in capsys.readouterr().out
