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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ('recording', 'iterations'), [('layers_are_recorded', 1), ('whole_iterations_are_recorded', 2)]
)
def test_passes_are_recorded_after_the_replay(
    recording: str, iterations: int, cluster: Make, reference: Reference
) -> None:
    """A job that is lost and started again records after so many iterations of its own."""
    job = cluster(*BASE, '--sparse-ckpt-window', str(WINDOW))
    mutation = f'mutations.recorded:{recording}'
    assert -9 in job.run(fail_at='1:8:forward', mutation=mutation)
    assert RECORDED.findall(job.output(0)) == [(str(iterations), '0')] * job.ranks
    job.finish(mutation=mutation)
    again = str(REPLAYED_WITH_FROZEN + iterations)
    assert RECORDED.findall(job.output(1)) == [(again, '0')] * job.ranks
    assert differences(reference(*BASE), read_digest(job)) == []
