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


def test_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(MOEVEMENT[:-1]) == 0
    assert '0.9379' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        ('--mtbf -5', '--mtbf is -5.0; give a number above 0'),
        ('--mtbf nan', '--mtbf is nan'),
        ('--gpus 8 --gpu-hours-per-failure 1', '--gpus is for a job without --mtbf'),
        ('--iteration-time 0', '--iteration-time is 0.0'),
        ('--window 0', '--window is 0; give a whole number, 1 or more'),
        ('--weibull-shape 0', '--weibull-shape is 0.0'),
        ('--spares -1', '--spares is -1'),
        ('--recovery localized', '--stages is missing'),
        ('--optimal-interval', '--optimal-interval moevement has a window'),
        ('--trace nowhere.csv', 'nowhere.csv: cannot be read'),
        ('--profile nowhere.json', 'nowhere.json: No such file'),
        ('--system dense', '--interval is missing'),
        ('--skew 0.1', '--experts is missing'),
        ('--skew 0.1 --experts 16', '--frozen-saving is missing; popularity matters to moevement'),
        ('--seed -1', '--seed is -1'),
    ],
)
def test_bad_input_names_the_flag(
    capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    with pytest.raises(SystemExit) as raised:
        simulate.main([*MOEVEMENT, *flags.split()])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_each_field_is_named_by_a_flag_that_there_is() -> None:
    parser = Parser('x')
    flags.add_scenario_flags(parser)
    text = parser.format_help()
    assert all(f'  {flag} ' in text for flag in flags.FLAG_OF_FIELD.values())


def test_missing_rate_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        simulate.main('--system dense --interval 5 --iteration-time 1'.split())
    assert raised.value.code == 2
    assert '--mtbf is missing' in capsys.readouterr().err


def test_infeasible_plan_names_the_operator(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ['--system', 'ours', '--profile', PROFILE, '--mtbf', '600']
    with pytest.raises(SystemExit) as raised:
        simulate.main([*flags, '--network-bandwidth', '0.01'])
    assert raised.value.code == 2
    assert "operator 'layer0.expert0'" in capsys.readouterr().err


def test_sweep_has_a_point_per_value(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / 'sweep.png'
    argv = ['sweep', '--over', 'mtbf', '--values', '300,3600', '--systems', 'gemini,ours']
    found = answer(capsys, [*argv, '--profile', PROFILE, '--json', '--plot', str(target)])
    assert [point['system'] for point in found] == ['gemini', 'ours'] * 2
    assert found[0]['ettr_exact'] < found[2]['ettr_exact']
    assert target.read_bytes().startswith(b'\x89PNG')


def test_skew_moves_the_systems_that_depend_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ['sweep', '--over', 'skew', '--values', '0,0.9', '--profile', PROFILE, '--mtbf', '600']
    argv += ['--job-hours', '12', '--json']
    found = answer(capsys, [*argv, '--systems', 'gemini,moc,ours', '--frozen-saving', '0.33'])
    assert [point['system'] for point in found] == ['gemini', 'moc', 'ours'] * 2
    (gemini, moc, ours), (same, unlucky, better) = found[:3], found[3:]
    assert gemini == {**same, 'value': 0.0}
    assert ours['ettr_simulated'] < better['ettr_simulated'] and ours['lost'] is None
    assert 1.02 * moc['lost'] < unlucky['lost'] < 2 * moc['lost']
    assert simulate.main([*argv[:-1], '--systems', 'moc', '--show', 'lost']) == 0
    assert f'{unlucky["lost"]:.4g}' in capsys.readouterr().out


def test_sweep_omits_infeasible_points(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ['sweep', '--over', 'network-bandwidth', '--values', '0.01,2', '--systems', 'ours']
    argv += ['--profile', PROFILE, '--mtbf', '600', '--json']
    assert simulate.main(argv) == 0
    printed = capsys.readouterr()
    assert [point['value'] for point in json.loads(printed.out)] == [2]
    assert 'ours at network-bandwidth 0.01' in printed.err


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        ('--over mtbf --values a --systems ours', '--values a: give numbers'),
        ('--over gpus --values 1.5 --systems ours', 'whole numbers'),
        ('--over mtbf --values 5 --systems best', "--systems: 'best' is not a system"),
        ('--over mtbf --values -5 --systems ours', '--mtbf is -5.0'),
        ('--over gpus --values inf --systems ours', 'whole numbers'),
        ('--over gpus --values nan --systems ours', 'whole numbers'),
        ('--over gpus --values 0 --systems ours --gpu-hours-per-failure 5', '--gpus is 0'),
        (f'--over mtbf --values 5,9 --systems ours --trace {TRACE}', '--trace fixes the failures'),
        (f'--over gpus --values 5,9 --systems ours --trace {TRACE}', '--trace fixes the failures'),
        ('--over gpus --values 5,9 --systems ours', '--gpu-hours-per-failure is missing'),
        (
            '--over gpus --values 5,9 --systems ours --mtbf 600 --gpu-hours-per-failure 5',
            '--mtbf fixes the rate',
        ),
        (
            '--over window --values 5,9 --systems gemini --mtbf 600',
            'none of --systems has a window',
        ),
        ('--over interval --values 5,9 --systems ours --mtbf 600', 'has an interval'),
        ('--over skew --values 0,0.5 --systems ours --mtbf 600', '--frozen-saving is missing'),
        (
            '--over skew --values 0,0.5 --systems gemini,ours --mtbf 600',
            'popularity matters to ours',
        ),
        (
            '--over skew --values 0,0.5 --systems moc,copy --copies 2 --nodes 24 --job-hours 1 '
            '--mtbf 600',
            'popularity matters to copy',
        ),
        ('--over skew --values 0,0.5 --systems gemini,none --mtbf 600', 'depends on popularity'),
        ('--over mtbf --values 5,9 --systems moc,gemini --show lost', 'gemini loses none'),
    ],
)
def test_bad_sweep_is_refused(capsys: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    argv = flags.replace('--values -5', '--values=-5').split()
    with pytest.raises(SystemExit) as raised:
        simulate.main(['sweep', *argv, '--profile', PROFILE])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_a_sweep_over_rates_needs_a_profile(capsys: pytest.CaptureFixture[str]) -> None:
    argv = 'sweep --over copy-bandwidth --values 1,2 --systems ours --window 3 --mtbf 600'.split()
    with pytest.raises(SystemExit) as raised:
        simulate.main([*argv, '--iteration-time', '3'])
    assert raised.value.code == 2
    assert '--profile is missing' in capsys.readouterr().err


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


def test_simulator_runs_as_a_module() -> None:
    command = [sys.executable, '-m', 'tools.simulate', *MOEVEMENT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)['window'] == 6


def test_engine_needs_numpy_alone() -> None:
    code = (
        'import sys, tools.simulate.monte_carlo as _;'
        'print(any(name in sys.modules for name in ("torch", "megatron", "msgspec")))'
    )
    command = [sys.executable, '-c', code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == 'False', done.stderr
