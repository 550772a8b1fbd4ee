# SPDX-License-Identifier: Apache-2.0
"""What benchmarks share: reports, CPU time, and how they end."""

from argparse import Namespace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from tools.lab.benchmark import run_benchmark
from tools.lab.cpu_clock import CpuClock, Spent
from tools.lab.errors import LabError
from tools.lab.figures import replacing, write_json


def test_cpu_clock_interpolates_between_samples() -> None:
    clock = CpuClock()
    clock._samples = [Spent(10.0, 0.0, 0.0), Spent(20.0, 5.0, 0.0), Spent(30.0, 4.0, 0.0)]
    assert clock.seconds(12.0, 20.0) == pytest.approx(4.0)
    assert clock.seconds(20.0, 30.0) == 0  # a child that ended takes nothing back


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / 'report.json'
    write_json(target, {'value': 1})
    with pytest.raises(RuntimeError), replacing(target) as partial:
        partial.write_bytes(b'{"val')
        raise RuntimeError('cut off')
    assert msgspec.json.decode(target.read_bytes()) == {'value': 1}
    assert [path.name for path in tmp_path.iterdir()] == ['report.json']


@pytest.mark.parametrize('flag', ['json', 'table'])
def test_nothing_is_measured_for_a_file_that_cannot_be_written(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / 'file').touch()
    for target in (tmp_path / 'file' / 'report', tmp_path):
        args = Namespace(**{'json': None, flag: target})
        assert run_benchmark('bench', args, lambda *_: pytest.fail('runs'), lambda *_: None) == 2
        assert f'bench: --{flag} {target}: ' in capsys.readouterr().out.replace('\n', '')


def test_failed_benchmark_prints_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(args: Namespace, console: Console) -> None:
        raise LabError('the job failed', 'its last words')

    assert run_benchmark('bench', Namespace(json=None), fails, lambda *_: None) == 2
    assert capsys.readouterr().out == 'its last words\nbench: the job failed\n'
