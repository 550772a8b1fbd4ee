# SPDX-License-Identifier: Apache-2.0
"""On a CPU a job of upstream's own layers trains and recovers, although the package is there.

Upstream takes parts of it for every job once it can be imported, and none of them runs there.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Callable

import pytest

from megatron.moevement.seams import cpu_device
from tests.distributed.conftest import (  # noqa: F401
    backend,
    cluster,
    differences,
    read_digest,
    text,
)
from tests.distributed.harness.cluster import ROOT, Cluster

pytestmark = [
    pytest.mark.transformer_engine,
    pytest.mark.skipif(
        importlib.util.find_spec('transformer_engine') is None, reason='needs Transformer Engine'
    ),
    pytest.mark.skipif(not cpu_device.needed(), reason='with a GPU its kernels run'),
]

FLAGS = """--bf16 --use-distributed-optimizer --pipeline-model-parallel-size 2
 --untie-embeddings-and-output-weights --train-iters 10""".split()
WINDOW = ['--sparse-ckpt-window', '3']
LOOKS = """
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import Adam
print(HAVE_TE, Adam.__module__)
"""


@pytest.mark.parametrize(
    ('imports', 'found'),
    [
        ('pretrain_gpt', 'False torch.optim.adamw'),
        (
            'transformer_engine.pytorch, pretrain_gpt',
            'True transformer_engine.pytorch.optimizers.fused_adam',
        ),
    ],
)
def test_library_is_hidden_from_upstream_unless_the_program_uses_it(
    imports: str, found: str
) -> None:
    program = f'import {imports}{LOOKS}'
    ended = subprocess.run(
        [sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.stdout.splitlines()[-1:] == [found], ended.stderr


def test_lost_stage_recovers_the_bits_of_a_plain_run(
    cluster: Callable[..., Cluster],  # noqa: F811
) -> None:
    plain = cluster(*FLAGS, sparse=False)
    plain.finish()
    local = cluster(*FLAGS, *WINDOW)
    assert local.survive(fail_at='1:8:backward') == {1: 1}
    assert differences(read_digest(plain), read_digest(local)) == []
