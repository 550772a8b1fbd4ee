# SPDX-License-Identifier: Apache-2.0
"""The check of all nodes, by real processes over gloo, each on an emulated node of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moevement_ext.memory.file_system import is_in_memory
from tests.distributed.harness.cluster import ROOT, free_port

pytestmark = pytest.mark.thorough

PLAN = """--num-layers 4 --hidden-size 64 --num-attention-heads 2 --seq-length 64
 --max-position-embeddings 64 --vocab-size 256 --num-experts 4 --micro-batch-size 1
 --global-batch-size 4 --pipeline-model-parallel-size 2 --bf16""".split()


def check(*flags: str, come: int = 2, **env: str) -> tuple[list[int], list[str]]:
    """Exit statuses, and what each rank printed."""
    port = str(free_port())
    places = [
        {'RANK': str(rank), 'LOCAL_RANK': '0', 'MOEVEMENT_NODE': f'node{rank}',
         **{name: value.format(rank=rank) for name, value in env.items()}}
        for rank in range(come)
    ]  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, '-m', 'tools.node_check', '--mib', '4', *flags],
            env={**os.environ, 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1',
                 'MASTER_PORT': port, **place},
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for place in places
    ]  # fmt: skip
    printed = [rank.communicate()[0] for rank in ranks]
    return [rank.returncode for rank in ranks], printed


@pytest.mark.thorough
def test_two_sound_nodes_pass() -> None:
    codes, printed = check('--', *PLAN)
    assert codes == [0, 0], printed
    assert '2 nodes, 2 ranks: 0 problems' in printed[0]
    assert re.search(
        r'tools\.plan: --copy-bandwidth [\d.]+ --network-bandwidth [\d.]+\n', printed[0]
    )


@pytest.mark.thorough
def test_measurements_are_shown_when_flags_cannot_be_planned(tmp_path: Path) -> None:
    """The check of memory is left out and says so; the directory is that of the flags."""
    flags = ['--num-layers', '4', '--hidden-size', '64', '--sparse-ckpt-dir', str(tmp_path / 'w')]
    codes, printed = check('--', *flags)
    on_disk = not is_in_memory(tmp_path)
    assert codes == [int(on_disk)] * 2, printed
    assert 'not checked: the memory that the flags need' in printed[0]
    assert '--num-attention-heads is missing' in printed[0]
    assert printed[0].count('--sparse-ckpt-dir is not in a tmpfs') == 2 * on_disk
    assert '--copy-bandwidth' in printed[0]


@pytest.mark.thorough
def test_variables_that_affect_bits_are_compared() -> None:
    codes, printed = check(NVTE_FUSED_ATTN='{rank}')
    assert codes == [1, 1], printed
    assert 'node1: NVTE_FUSED_ATTN is 1, elsewhere 0' in printed[0]


@pytest.mark.thorough
def test_too_little_memory_is_reported() -> None:
    codes, printed = check('--need-gib', '1e6')
    assert codes == [1, 1], printed
    for node in range(2):
        assert f'node{node}: ' in printed[0] and '1000000.0 are needed' in printed[0]


@pytest.mark.thorough
def test_missing_rank_is_reported() -> None:
    codes, printed = check('--timeout', '3', come=1)
    assert codes == [2]
    assert 'ranks [1] of 2 did not join within 3 s' in printed[0]
