# SPDX-License-Identifier: Apache-2.0
"""Upstream records passes (`--cuda-graph-impl transformer_engine`) after a recovery has replayed.

What is recorded then has no frozen operators. The recording itself needs a GPU.
"""

import re
from collections.abc import Callable

from moevement_ext.events import Recovered
from tests.distributed.conftest import differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.test_whole_job_recovery import BASE

RECORDING = 'mutations.recorded:passes_are_recorded'
RECORDED = re.compile(r'recorded before iteration: (\d+) \| frozen: (\d+)')


def test_passes_are_recorded_once_a_recovery_has_replayed(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    job = cluster(*BASE, '--sparse-ckpt-window', '3')
    assert -9 in job.run(fail_at='1:8:forward', mutation=RECORDING)
    assert RECORDED.findall(job.output(0)) == [('2', '0')] * job.ranks
    job.finish(mutation=RECORDING)
    (recovered,) = job.events_of(Recovered)
    catches_up_from = recovered.iteration - recovered.replayed + 2  # W - 1 of them are frozen
    assert RECORDED.findall(job.output(1)) == [(str(catches_up_from + 2), '0')] * job.ranks
    assert differences(reference(*BASE), read_digest(job)) == []
