# SPDX-License-Identifier: Apache-2.0
"""Faults of random and fixed seeds: nothing is lost, and the bits equal a fault-free run."""

import re
import secrets
import sys
from pathlib import Path

import pytest

from tests.distributed.harness.commands import run_to_end
from tools.lab import models

HANG_TIMEOUT_S = 15
SOUND = 'lost_iterations=0 bit_identical=true survivors_lost=0'
EVERYTHING_ON = 35136
"""Draws PP 2 x EP 2 with every feature that the test names, and four second kills in recoveries."""
NARROW = 1688
"""Draws C4, C2 and C5 for the first three configurations, without evaluations."""
MODEL = """--num-layers 2 --untie-embeddings-and-output-weights --micro-batch-size 1
 --global-batch-size 4 --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 2"""
RANDOM = {
    'one layout': '--faults 8 --faults-per-job 8',
    # Layout, precision, features, window, replicas, tiers and launcher; kinds and moments.
    'drawn configurations': '--configurations 5 --faults 20 --faults-per-job 4',
    'without spares': '--without-spares --faults 12 --faults-per-job 4',
}


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize('campaign', RANDOM)
def test_faults_of_a_random_seed_are_survived(campaign: str, tmp_path: Path) -> None:
    """Others in each run; the command that repeats them is printed."""
    seed = secrets.randbelow(2**31)
    last_line = struck(tmp_path, RANDOM[campaign], seed)
    assert last_line.endswith(SOUND), f'seed {seed}: {last_line}'
    (faults,) = re.findall(r'^chaos: faults=(\d+) ', last_line)
    counted = re.findall(r'(?:localized|whole_job|disk)=(\d+)', last_line)
    assert sum(map(int, counted)) == int(faults) > 0


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ('flags', 'seed'),
    [
        (  # on stand-ins for Transformer Engine
            '--stand-ins --configurations 3 --faults 6 --faults-per-job 2 '
            '--kinds kill,stop,node,double',
            NARROW,
        ),
        # Evaluation, dense checkpoints, dropout, loader workers, recomputation; twice at once.
        ('--configurations 1 --faults 4 --faults-per-job 4 --kinds double', EVERYTHING_ON),
    ],
    ids=['narrow', 'everything-on'],
)
def test_faults_of_fixed_seeds_are_survived(flags: str, seed: int, tmp_path: Path) -> None:
    """Narrow state, and faults during recoveries with all features on."""
    last_line = struck(tmp_path, flags, seed)
    assert last_line.endswith(SOUND), last_line


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_restarts_in_drawn_layouts_have_the_bits_of_plain_megatron(tmp_path: Path) -> None:
    last_line = struck(tmp_path, '--elastic --faults 3', secrets.randbelow(2**31))
    assert 'bit_identical=true' in last_line


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_drill_of_a_model_passes(tmp_path: Path) -> None:
    model = models.ToyModel(hidden=32, heads=2, sequence=32, experts=4)
    training = f'{MODEL} --bf16 --pipeline-model-parallel-size 2'.split()
    flags = model.training_flags(training, models.prepare_text(tmp_path / 'data', 1), 16)
    command = [sys.executable, *'-m tools.drill --nodes 2 --first 6 --second 12'.split()]
    command += ['--iterations', '16', '--output', str(tmp_path / 'out'), '--', *flags]
    done = run_to_end(command, timeout_s=850)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith('drill passed, all bits are equal: ')


def struck(output: Path, flags: str, seed: int) -> str:
    """Run the tool; returns its last line."""
    again = f'python -m tools.chaos {flags} --seed {seed} --hang-timeout {HANG_TIMEOUT_S}'
    print(f'the same faults again: {again}')
    command = [sys.executable, *again.split()[1:], '--output', str(output)]
    done = run_to_end(command, timeout_s=1750)
    text = f'{again}\n{done.stdout}{done.stderr}'
    print(text)
    assert done.returncode == 0, text
    return done.stdout.splitlines()[-1]
