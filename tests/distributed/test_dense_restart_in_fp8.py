# SPDX-License-Identifier: Apache-2.0
"""A dense checkpoint of weights in fp8 is loaded, workers die, and windows bring them back.

It holds what weights, masters and moments stand for, so that a restart from it rounds them anew. So
does one of plain Megatron, whose bits are those to be had here.
"""

from pathlib import Path

import pytest

from tests.distributed.conftest import Make, read_digest
from tests.distributed.test_localized_recovery import check_both_ways
from tests.distributed.test_masters import STAND_INS
from tools.lab import precisions

LAYOUT = '--untie-embeddings-and-output-weights --pipeline-model-parallel-size 4'
CASES = {name: f'{precisions.FLAGS[name]} {LAYOUT}' for name in ('c2', 'c4', 'c5')}


@pytest.mark.thorough
@pytest.mark.parametrize('case', CASES)
def test_windows_after_a_dense_restart_match_that_restart_bit_for_bit(
    case: str, cluster: Make, tmp_path: Path
) -> None:
    flags = [*CASES[case].split(), '--train-iters', '12']
    saving = ['--save', str(tmp_path / 'dense'), '--save-interval', '4', '--exit-interval', '4']
    load = ['--load', str(tmp_path / 'dense')]
    cluster(*flags, *saving, sparse=False).finish(mutation=STAND_INS)
    plain = cluster(*flags, *load, sparse=False)
    plain.finish(mutation=STAND_INS)
    assert 'successfully loaded checkpoint' in plain.output(attempt=0)
    lost_at = '1:9:backward', '1:11:forward'
    check_both_ways(cluster, [*flags, *load], read_digest(plain), STAND_INS, lost_at)
