# SPDX-License-Identifier: Apache-2.0
"""Faults of a seed: nothing is lost and the bits are those of no fault. Campaigns draw others."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.conftest import ROOT

FAULTS = 8
SEED = 20261121


@pytest.mark.timeout(560)
def test_random_faults(tmp_path: Path) -> None:
    last_line = struck(tmp_path, f'--fork --faults {FAULTS} --faults-per-job {FAULTS}')
    summary = re.fullmatch(
        rf'chaos: faults={FAULTS} localized=(\d+) whole_job=(\d+) disk=0 lost_iterations=0 '
        'bit_identical=true phases_covered=0/0 survivors_lost=0',
        last_line,
    )
    assert summary is not None, last_line
    assert int(summary[1]) + int(summary[2]) == FAULTS
    assert int(summary[1]) > int(summary[2]), 'recovery is hardly ever localized'


def struck(output: Path, flags: str) -> str:
    """Run the tool; returns its last line."""
    again = f'python -m tools.chaos {flags} --seed {SEED}'
    print(f'the same faults again: {again}')
    command = [sys.executable, *again.split()[1:], '--output', str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540)
    text = f'{again}\n{done.stdout}{done.stderr}'
    print(text)
    assert done.returncode == 0, text
    return done.stdout.splitlines()[-1]
