# SPDX-License-Identifier: Apache-2.0
"""Workers are SIGKILLed one by one; only their stage replays, and every bit is as if none died."""

from collections.abc import Callable

import pytest

from tests.distributed.cluster import Cluster
from tests.distributed.conftest import differences, read_digest

BF16 = '--bf16 --use-distributed-optimizer'
UNTIED = '--untie-embeddings-and-output-weights'
ITERATIONS = '--train-iters 12'
PP_EP = '--pipeline-model-parallel-size 2 --expert-model-parallel-size 2'
BASE = f'{BF16} {PP_EP} {UNTIED} {ITERATIONS}'.split()


@pytest.mark.parametrize('fail_at', ['2:8:forward'])
def test_lost_worker_is_replaced(
    fail_at: str, cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    job = cluster(*BASE, '--sparse-ckpt-window', '3')
    assert job.survive(fail_at=fail_at) == {int(fail_at[0]): 1}
    assert differences(reference(*BASE), read_digest(job)) == []
