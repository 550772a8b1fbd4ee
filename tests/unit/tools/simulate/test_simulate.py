# SPDX-License-Identifier: Apache-2.0
"""tools/simulate.py: its answers as JSON, sweeps, and what it says to bad input."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

from tools.lab.arguments import Parser
from tools.simulate import __main__ as simulate
from tools.simulate import flags, sweep

ROOT = Path(__file__).resolve().parents[4]
PROFILE = str(ROOT / 'docs' / 'assets' / 'simulate-profile.json')
TRACE = str(ROOT / 'docs' / 'assets' / 'simulate-trace.csv')
MOEVEMENT = (
    '--system moevement --window 6 --iteration-time 2.9 --overhead 0.06 --mtbf 600 '
    '--restart-time 0 --json'
).split()


def answer(capsys: pytest.CaptureFixture[str], argv: list[str]) -> Any:
    assert simulate.main(argv) == 0
    return json.loads(capsys.readouterr().out)


def test_each_field_is_named_by_a_flag_that_there_is() -> None:
    parser = Parser('x')
    flags.add_scenario_flags(parser)
    text = parser.format_help()
    assert all(f'  {flag} ' in text for flag in flags.FLAG_OF_FIELD.values())


def test_sweep_omits_infeasible_points(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ['sweep', '--over', 'network-bandwidth', '--values', '0.01,2', '--systems', 'ours']
    argv += ['--profile', PROFILE, '--mtbf', '600', '--json']
    assert simulate.main(argv) == 0
    printed = capsys.readouterr()
    assert [point['value'] for point in json.loads(printed.out)] == [2]
    assert 'ours at network-bandwidth 0.01' in printed.err


@pytest.mark.parametrize(('name', 'problem'), [('x.xyz', 'xyz'), ('file/x.png', 'file')])
def test_a_plot_that_cannot_be_written_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, problem: str
) -> None:
    (tmp_path / 'file').touch()
    target = tmp_path / name
    with pytest.raises(SystemExit) as raised:
        command = 'sweep --over mtbf --values 600 --systems ours'.split()
        simulate.main([*command, '--profile', PROFILE, '--plot', str(target)])
    assert raised.value.code == 2
    printed = capsys.readouterr().err.splitlines()[-1]
    assert f'--plot {target}: ' in printed and problem in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ['file']


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


def test_simulating_needs_neither_torch_nor_megatron() -> None:
    code = (
        'import sys, tools.simulate.monte_carlo as _;'
        'print(any(name in sys.modules for name in ("torch", "megatron")))'
    )
    command = [sys.executable, '-c', code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == 'False', done.stderr
