# SPDX-License-Identifier: Apache-2.0
"""What benchmarks share: reports, CPU time, lines of a training log, forms of figures."""

import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.unit.tools.samples import CONVERTED, iteration_line
from tools.lab.cpu_clock import CpuClock, Spent, spent
from tools.lab.figures import replacing, write_json
from tools.lab.launch import family, kill_all
from tools.lab.run_log import Captured, parse_log


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


def test_restart_from_memory_begins_an_attempt_even_with_consecutive_numbers() -> None:
    log = parse_log(iteration_line(3, 1, 3.0) + CONVERTED + iteration_line(4, 9, 3.0))
    assert [[item.number for item in attempt] for attempt in log.attempts] == [[3], [4]]


@pytest.mark.parametrize('again', [1, 3])
def test_a_restart_without_conversion_begins_an_attempt(again: int) -> None:
    log = parse_log(iteration_line(3, 1, 3.0) + iteration_line(again, 9, 3.0))
    assert [[item.number for item in attempt] for attempt in log.attempts] == [[3], [again]]


def test_wall_seconds_have_the_stall_of_saving_in_them() -> None:
    times = ((1, 1.0), (2, 2.0), (3, 2.5), (4, 4.5))
    log = parse_log(''.join(iteration_line(number, time) for number, time in times))
    assert log.wall_seconds(1) == pytest.approx([1.0, 0.5, 2.0])
    assert log.wall_seconds(2, 3) == pytest.approx([0.5])


def test_a_checkpoint_every_few_iterations_counts_by_the_iteration() -> None:
    line = ' sparse ckpt | window: 1 | interval: 4 | slot bytes: 800 | exposed (ms): 1.5 |\n'
    log = parse_log(iteration_line(3, 1, 3.0) + line)
    assert log.captured == [Captured(3, 1, 200, 1.5, 4)]
