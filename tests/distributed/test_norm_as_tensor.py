# SPDX-License-Identifier: Apache-2.0
"""The gradient norm is a tensor, as with Transformer Engine: replays clip with the same bits."""

from collections.abc import Callable

from tests.distributed.conftest import differences, read_digest
from tests.distributed.harness.cluster import Cluster

FLAGS = """--bf16 --use-distributed-optimizer --pipeline-model-parallel-size 2
 --untie-embeddings-and-output-weights --train-iters 12""".split()
VARIANT = 'mutations.upstream_variants:norm_as_tensor'


def _reference(cluster: Callable[..., Cluster]) -> dict:
    plain = cluster(*FLAGS, sparse=False)
    plain.finish(mutation=VARIANT)
    return read_digest(plain)


def test_whole_job_and_localized_replays_clip_by_a_tensor(cluster: Callable[..., Cluster]) -> None:
    reference = _reference(cluster)
    whole = cluster(*FLAGS, '--sparse-ckpt-window', '3')
    assert -9 in whole.run(fail_at='1:9:forward', mutation=VARIANT)
    whole.finish(mutation=VARIANT)
    assert whole.events('recovered')[0]['replayed'] >= 2
    assert differences(reference, read_digest(whole)) == []
    local = cluster(*FLAGS, '--sparse-ckpt-window', '3')
    assert local.survive(fail_at='1:8:backward', mutation=VARIANT) == {1: 1}
    assert differences(reference, read_digest(local)) == []
