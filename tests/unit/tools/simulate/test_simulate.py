# SPDX-License-Identifier: Apache-2.0
"""Pictures of sweeps; answers are in `test_recorded_answers`."""

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
