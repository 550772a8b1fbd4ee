# SPDX-License-Identifier: Apache-2.0
"""Upstream records passes (`--cuda-graph-impl transformer_engine`) after a recovery has replayed.

What is recorded then has no frozen operators. The recording itself needs a GPU.
"""

import re
from collections.abc import Callable

from tests.distributed.conftest import differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.test_whole_job_recovery import BASE

RECORDING = 'mutations.recorded:passes_are_recorded'
WINDOW = 3
RECORDED = re.compile(r'recorded after iterations: (\d+) \| frozen: (\d+)')


def test_passes_are_recorded_once_a_recovery_has_replayed(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    job = cluster(*BASE, '--sparse-ckpt-window', str(WINDOW))
    assert -9 in job.run(fail_at='1:8:forward', mutation=RECORDING)
    assert RECORDED.findall(job.output(0)) == [('1', '0')] * job.ranks
    job.finish(mutation=RECORDING)
    replayed_with_frozen = WINDOW - 1
    assert RECORDED.findall(job.output(1)) == [(str(replayed_with_frozen + 1), '0')] * job.ranks
    assert differences(reference(*BASE), read_digest(job)) == []
