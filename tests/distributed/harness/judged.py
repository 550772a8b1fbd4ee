# SPDX-License-Identifier: Apache-2.0
"""Result of `tools.check` for the flags of a job, to compare with the messages of its start."""

from megatron.moevement.seams import cpu_device
from tests.distributed.harness.cluster import Cluster

cpu_device.install()

from megatron.moevement.checking import Judgement, judge  # noqa: E402


def judged(job: Cluster) -> Judgement:
    return judge(job.flags, job.ranks)
