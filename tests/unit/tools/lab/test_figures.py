# SPDX-License-Identifier: Apache-2.0
"""What benchmarks share: reports, and CPU time."""

import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from tools.lab.cpu_clock import CpuClock, Spent, spent
from tools.lab.figures import replacing, write_json
from tools.lab.launch import family, kill_all


def test_cpu_clock_interpolates_between_samples() -> None:
    clock = CpuClock()
    clock._samples = [Spent(10.0, 0.0, 0.0), Spent(20.0, 5.0, 0.0), Spent(30.0, 4.0, 0.0)]
    assert clock.seconds(12.0, 20.0) == pytest.approx(4.0)
    assert clock.seconds(20.0, 30.0) == 0  # a child that ended takes nothing back


def test_all_processes_below_the_launcher_count() -> None:
    burns = 'import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ntime.sleep(600)'
    starts = f'import subprocess, sys\nsubprocess.run([sys.executable, "-c", {burns!r}])'
    with subprocess.Popen([sys.executable, '-c', starts], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        found = spent([launcher.pid])
        kill_all(family([psutil.Process(launcher.pid)]))
    assert found.total_s >= 0.5 and found.training_s == 0.0


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / 'report.json'
    write_json(target, {'value': 1})
    with pytest.raises(RuntimeError), replacing(target) as partial:
        partial.write_bytes(b'{"val')
        raise RuntimeError('cut off')
    assert msgspec.json.decode(target.read_bytes()) == {'value': 1}
    assert [path.name for path in tmp_path.iterdir()] == ['report.json']
