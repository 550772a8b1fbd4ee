# SPDX-License-Identifier: Apache-2.0
"""Random faults, others in every run: nothing is lost and the bits are those of no fault."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.conftest import ROOT

FAULTS = 20


@pytest.mark.timeout(560)
def test_random_faults(tmp_path: Path) -> None:
    last_line = struck(tmp_path, f'--faults {FAULTS} --faults-per-job {FAULTS}')
    summary = re.fullmatch(
        rf'chaos: faults={FAULTS} localized=(\d+) whole_job=(\d+) disk=0 lost_iterations=0 '
        'bit_identical=true phases_covered=0/0 survivors_lost=0',
        last_line,
    )
    assert summary is not None, last_line
    assert int(summary[1]) + int(summary[2]) == FAULTS
    assert int(summary[1]) > int(summary[2]), 'recovery is hardly ever localized'


@pytest.mark.timeout(560)
def test_second_strikes_in_jobs_of_two_drawn_configurations(tmp_path: Path) -> None:
    flags = '--configurations 2 --faults 6 --faults-per-job 3 --aimed 1 --kinds kill'
    last_line = struck(tmp_path, f'{flags} --cover meet,catch-up:kill')
    summary = re.fullmatch(
        r'chaos: faults=(\d+) .* lost_iterations=0 bit_identical=true phases_covered=2/2 '
        'survivors_lost=0',
        last_line,
    )
    assert summary is not None and int(summary[1]) >= 6, last_line


def struck(output: Path, flags: str) -> str:
    """Run the tool with another seed every time; returns its last line."""
    again = f'python -m tools.chaos {flags} --seed {time.time_ns()}'
    print(f'the same faults again: {again}')
    command = [sys.executable, *again.split()[1:], '--output', str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540)
    text = f'{again}\n{done.stdout}{done.stderr}'
    print(text)
    assert done.returncode == 0, text
    return done.stdout.splitlines()[-1]
