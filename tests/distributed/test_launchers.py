# SPDX-License-Identifier: Apache-2.0
"""A job under `moevement launch`, as in the first example of README.

Under `torchrun`: `test_store.py`, `test_torchrun.py`. Under Slurm: `tests/cluster`.
"""

import sys
from pathlib import Path

import pytest

from tests.distributed.harness.commands import run_to_end

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(600)]


def test_demo_survives_a_lost_node_with_the_same_bits(tmp_path: Path) -> None:
    flags = f'--iterations 12 --kill-after 8 --window 3 --output {tmp_path}'
    done = run_to_end([sys.executable, '-m', 'tools.demo', *flags.split()], timeout_s=540)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert 'demo: bit_identical=true' in done.stdout
