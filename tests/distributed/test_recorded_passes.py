# SPDX-License-Identifier: Apache-2.0
"""Upstream records passes as CUDA graphs once a recovery has replayed, with nothing frozen.

Recording itself needs a GPU.
"""

import re

import pytest

from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.test_whole_job_recovery import BASE

WINDOW = 3
REPLAYED_WITH_FROZEN = WINDOW - 1
RECORDED = re.compile(r'recorded after iterations: (\d+) \| frozen: (\d+)')


def recorded_after(cluster: Make, reference: Reference, iterations: int, recording: str) -> None:
    """A job that is lost and started again records after so many iterations of its own."""
    job = cluster(*BASE, '--sparse-ckpt-window', str(WINDOW))
    mutation = f'mutations.recorded:{recording}'
    assert -9 in job.run(fail_at='1:8:forward', mutation=mutation)
    assert RECORDED.findall(job.output(0)) == [(str(iterations), '0')] * job.ranks
    job.finish(mutation=mutation)
    again = str(REPLAYED_WITH_FROZEN + iterations)
    assert RECORDED.findall(job.output(1)) == [(again, '0')] * job.ranks
    assert differences(reference(*BASE), read_digest(job)) == []


@pytest.mark.thorough
def test_layers_are_recorded_between_iterations(cluster: Make, reference: Reference) -> None:
    recorded_after(cluster, reference, 1, 'layers_are_recorded')


@pytest.mark.thorough
def test_whole_iteration_is_recorded_after_the_warm_up(cluster: Make, reference: Reference) -> None:
    recorded_after(cluster, reference, 2, 'whole_iterations_are_recorded')
