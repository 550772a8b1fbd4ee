# SPDX-License-Identifier: Apache-2.0
"""Twenty random faults, others in every run: nothing is lost and the bits are those of no fault."""

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
    seed = time.time_ns()
    again = f'python -m tools.chaos --faults {FAULTS} --faults-per-job {FAULTS} --seed {seed}'
    print(f'the same faults again: {again}')
    command = [sys.executable, *again.split()[1:], '--output', str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540)
    output = f'{again}\n{done.stdout}{done.stderr}'
    print(output)
    assert done.returncode == 0, output
    summary = re.fullmatch(
        rf'chaos: faults={FAULTS} localized=(\d+) whole_job=(\d+) disk=0 lost_iterations=0 '
        'bit_identical=true',
        done.stdout.splitlines()[-1],
    )
    assert summary is not None, output
    assert int(summary[1]) + int(summary[2]) == FAULTS
    assert int(summary[1]) > int(summary[2]), 'recovery is hardly ever localized'
