# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.tools.samples import HARDWARE
from tools.bench import start
from tools.bench.frame import Report, over_rounds
from tools.bench.start import FIGURES, PLAIN, SPARE, TORCHRUN, WAYS, Start
from tools.lab.errors import LabError
from tools.lab.launch import Launch


def test_last_line_compares_the_hot_spare_with_plain_megatron(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain, torchrun, spare = Start(10.0, 9.0, 2000), Start(9.5, 8.0, 1500), Start(9.0, 6.3, 1000)
    rounds = [{PLAIN: plain, TORCHRUN: torchrun, SPARE: spare}]
    ways = over_rounds(rounds, WAYS, FIGURES)
    start.show(Report(HARDWARE, {}, ways, [], rounds), Console(width=120))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == 'start: seconds=0.90 cpu=0.70 memory=0.50'


@pytest.mark.timed
@pytest.mark.timeout(300)
def test_start_ends_at_the_first_iteration_or_without_one(tmp_path: Path) -> None:
    program = tmp_path / 'program.py'
    program.write_text(
        'import sys, time\nprint(" iteration        1/    1000 |", flush=True)\ntime.sleep(1000)\n'
    )
    found = start.start(SPARE, Launch(tmp_path / 'trains', [], 2, 1, program_file=str(program)))
    assert found.seconds > 0 and found.cpu_s > 0 and found.memory > 10**7
    program.write_text('raise SystemExit(2)')
    with pytest.raises(LabError, match='launch: the job ended before iteration 1'):
        start.start(SPARE, Launch(tmp_path / 'fails', [], 2, 1, program_file=str(program)))
