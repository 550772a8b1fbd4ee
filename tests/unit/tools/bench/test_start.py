# SPDX-License-Identifier: Apache-2.0
from argparse import Namespace
from pathlib import Path

import pytest

from tests.unit.tools.samples import HARDWARE
from tools.bench.start import PLAIN, SPARE, TORCHRUN, Start, StartBench, start
from tools.lab.errors import LabError
from tools.lab.launch import Launch


def test_last_line_compares_the_hot_spare_with_plain_megatron() -> None:
    plain, torchrun, spare = Start(10.0, 9.0, 2000), Start(9.5, 8.0, 1500), Start(9.0, 6.3, 1000)
    bench = StartBench(Namespace(), Path(), Path())
    report = bench.summary(HARDWARE, [{PLAIN: plain, TORCHRUN: torchrun, SPARE: spare}])
    assert report.notes == ['start: seconds=0.90 cpu=0.70 memory=0.50']


@pytest.mark.timed
@pytest.mark.timeout(300)
def test_start_ends_at_the_first_iteration_or_without_one(tmp_path: Path) -> None:
    program = tmp_path / 'program.py'
    program.write_text(
        'import sys, time\nprint(" iteration        1/    1000 |", flush=True)\ntime.sleep(1000)\n'
    )
    found = start(SPARE, Launch(tmp_path / 'trains', [], 2, 1, program_file=str(program)))
    assert found.seconds > 0 and found.cpu_s > 0 and found.memory > 10**7
    program.write_text('raise SystemExit(2)')
    with pytest.raises(LabError, match='launch: the job ended before iteration 1'):
        start(SPARE, Launch(tmp_path / 'fails', [], 2, 1, program_file=str(program)))
