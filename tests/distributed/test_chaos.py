# SPDX-License-Identifier: Apache-2.0
"""Faults of random and fixed seeds: nothing is lost, and the bits equal a fault-free run."""

import re
import secrets
import sys
from pathlib import Path

import pytest

from tests.distributed.harness.commands import run_to_end

FAULTS = 8
HANG_TIMEOUT_S = 15
EVERYTHING_ON = 35136
"""Draws PP 2 x EP 2 with every feature that the test names, and four second kills in recoveries."""
NARROW = 1688
"""Draws C4, C2 and C5 for the first three configurations, without evaluations."""


@pytest.mark.thorough
@pytest.mark.timeout(560)
def test_faults_of_a_random_seed_are_survived(tmp_path: Path) -> None:
    """Others in each run; the command that repeats them is printed."""
    seed = secrets.randbelow(2**31)
    last_line = struck(tmp_path, f'--fork --faults {FAULTS} --faults-per-job {FAULTS}', seed)
    summary = re.fullmatch(
        rf'chaos: faults={FAULTS} localized=(\d+) whole_job=(\d+) disk=(\d+) lost_iterations=0 '
        'bit_identical=true survivors_lost=0',
        last_line,
    )
    assert summary is not None, f'seed {seed}: {last_line}'
    assert sum(map(int, summary.groups())) == FAULTS


@pytest.mark.thorough
@pytest.mark.timeout(560)
def test_random_faults_with_narrow_state_are_survived(tmp_path: Path) -> None:
    """On stand-ins for Transformer Engine."""
    last_line = struck(
        tmp_path,
        '--fork --stand-ins --configurations 3 --faults 6 --faults-per-job 2 '
        '--kinds kill,stop,node,double',
        seed=NARROW,
    )
    assert last_line.endswith('bit_identical=true survivors_lost=0'), last_line


@pytest.mark.thorough
@pytest.mark.timeout(560)
def test_faults_during_recovery_are_survived_with_all_features_on(tmp_path: Path) -> None:
    """Evaluation, dense checkpoints, dropout, loader workers, recomputation; twice at once."""
    last_line = struck(
        tmp_path,
        '--fork --configurations 1 --faults 4 --faults-per-job 4 --kinds double',
        seed=EVERYTHING_ON,
    )
    assert last_line.endswith('bit_identical=true survivors_lost=0'), last_line


def struck(output: Path, flags: str, seed: int) -> str:
    """Run the tool; returns its last line."""
    again = f'python -m tools.chaos {flags} --seed {seed} --hang-timeout {HANG_TIMEOUT_S}'
    print(f'the same faults again: {again}')
    command = [sys.executable, *again.split()[1:], '--output', str(output)]
    done = run_to_end(command, timeout_s=540)
    text = f'{again}\n{done.stdout}{done.stderr}'
    print(text)
    assert done.returncode == 0, text
    return done.stdout.splitlines()[-1]
