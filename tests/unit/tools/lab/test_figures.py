# SPDX-License-Identifier: Apache-2.0
"""What benchmarks share: reports, CPU time, and how they end."""

import io
from argparse import Namespace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from tools.lab import benchmark
from tools.lab.benchmark import run_benchmark, write_table
from tools.lab.cpu_clock import CpuClock, Spent
from tools.lab.errors import LabError
from tools.lab.figures import replacing, write_json
from tools.lab.hardware import Hardware


def test_cpu_clock_interpolates_between_samples() -> None:
    clock = CpuClock()
    clock._samples = [Spent(10.0, 0.0, 0.0), Spent(20.0, 5.0, 0.0), Spent(30.0, 4.0, 0.0)]
    assert clock.seconds(12.0, 20.0) == pytest.approx(4.0)
    assert clock.seconds(20.0, 30.0) == 0  # a child that ended takes nothing back


def test_report_is_json_without_hosts_or_folders(tmp_path: Path) -> None:
    target = tmp_path / 'new' / 'report.json'
    write_json(target, {'hardware': Hardware.here(gpu=False), 'value': 1.23456789})
    report = msgspec.json.decode(target.read_bytes())
    assert report['value'] == 1.2346
    assert report['hardware']['cores'] >= 1
    assert '/' not in report['hardware']['processor']


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / 'report.json'
    write_json(target, {'value': 1})
    with pytest.raises(RuntimeError), replacing(target) as partial:
        partial.write_bytes(b'{"val')
        raise RuntimeError('cut off')
    assert msgspec.json.decode(target.read_bytes()) == {'value': 1}
    assert [path.name for path in tmp_path.iterdir()] == ['report.json']


def test_devices_are_written_directly_and_links_stay(tmp_path: Path) -> None:
    with replacing(Path('/dev/null')) as partial:
        assert partial == Path('/dev/null')
    (tmp_path / 'link').symlink_to('real')
    (tmp_path / 'real').write_text('old')
    write_json(tmp_path / 'link', 3)
    assert (tmp_path / 'link').is_symlink() and (tmp_path / 'real').read_text() == '3\n'


@pytest.mark.parametrize('flag', ['json', 'table'])
def test_nothing_is_measured_for_a_file_that_cannot_be_written(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / 'file').touch()
    for target in (tmp_path / 'file' / 'report', tmp_path):
        args = Namespace(**{'json': None, flag: target})
        assert run_benchmark('bench', args, lambda *_: pytest.fail('runs'), lambda *_: None) == 2
        assert f'bench: --{flag} {target}: ' in capsys.readouterr().out.replace('\n', '')


def test_report_that_can_no_longer_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other file is written, and none in part."""
    args = Namespace(json=tmp_path / 'json', table=tmp_path / 'table')

    def measure(*_: object) -> int:
        args.json.mkdir()
        args.table.mkdir()
        return 1

    assert run_benchmark('bench', args, measure, lambda *_: write_table(args.table, '|')) == 2
    said = capsys.readouterr().out.replace('\n', '')
    assert all(f'bench: --{flag} {tmp_path / flag}: ' in said for flag in ('json', 'table'))
    write_table(tmp_path / 'new' / 'table', '|')
    assert [path.name for path in (tmp_path / 'new').iterdir()] == ['table']


class Report(msgspec.Struct):
    exact: bool


@pytest.mark.parametrize(('exact', 'status'), [(True, 0), (False, 1)])
def test_a_benchmark_shows_and_writes_its_report(exact: bool, status: int, tmp_path: Path) -> None:
    shown = []
    target = tmp_path / 'report.json'
    report = Report(exact)
    args = Namespace(json=target)
    code = run_benchmark('bench', args, lambda *_: report, lambda found, _: shown.append(found))
    assert (code, shown) == (status, [report])
    assert msgspec.json.decode(target.read_bytes()) == {'exact': exact}


def test_report_that_cannot_be_shown_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def show(*_: object) -> None:
        raise LabError('--table: no space')

    target = tmp_path / 'report.json'
    args = Namespace(json=target)
    assert run_benchmark('bench', args, lambda *_: Report(True), show) == 2
    assert msgspec.json.decode(target.read_bytes()) == {'exact': True}
    assert 'bench: --table: no space' in capsys.readouterr().out


def test_failed_benchmark_prints_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr(benchmark, 'Console', lambda: Console(file=text, width=100))

    def fails(args: Namespace, console: Console) -> None:
        raise LabError('the job failed', 'its last words')

    code = run_benchmark('bench', Namespace(json=None), fails, lambda *_: None)
    assert code == 2
    assert text.getvalue() == 'its last words\nbench: the job failed\n'
