# SPDX-License-Identifier: Apache-2.0
"""What `tools.check` says of the flags of a job, to be compared with what its start says."""

from megatron.moevement.seams import cpu_device
from tests.distributed.harness.cluster import Cluster

cpu_device.install()

from megatron.moevement.checking import Judgement, judge  # noqa: E402


def judged(job: Cluster) -> Judgement:
    """Without starting it."""
    return judge(job.flags, job.ranks)
