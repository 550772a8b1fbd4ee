# SPDX-License-Identifier: Apache-2.0
"""A long job that ends, dies and comes back by each tier, from launch to launch.

By windows where they are newest, by a dense checkpoint where that is, and from the start where
there is neither.
"""

from pathlib import Path

import pytest

from moevement_ext.events import NextTier, Recovered
from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.faults import PERSISTED, SEALED, SETTLED

pytestmark = pytest.mark.timeout(900)

FLAGS = (
    '--bf16 --use-distributed-optimizer --pipeline-model-parallel-size 2 '
    '--untie-embeddings-and-output-weights --num-layers 2 --train-iters 30'
).split()
ENDS = ['--exit-interval', '4']
WHOLE_JOB = 'the whole job'
BOTH = {0, 1}


class Job:
    """Two stages that are launched again and again."""

    def __init__(self, job: Cluster, dense: Path) -> None:
        self.job = job
        self.dense = [f'--save={dense}', f'--load={dense}', '--save-interval', '5']
        self._flags = list(job.flags)

    def survive(self, *flags: str, fail_at: str = '') -> dict[int, int]:
        self.job.flags = [*self._flags, *flags]
        return self.job.survive(fail_at=fail_at, mutation=SEALED)

    def dies(self, where: str) -> None:
        self.job.flags = [*self._flags, *self.dense]
        assert -9 in self.job.run(fail_at=where, mutation=PERSISTED)

    def said_at_its_end(self) -> str:
        output = self.job.output(self.job.attempts - 1)
        (line,) = (x for x in output.splitlines() if ' sparse ckpt | exit at' in x)
        return line

    def tiers(self) -> list[tuple[str, str]]:
        """Of rank 0 so far, each with its reason."""
        return [(event.tier, event.reason) for event in self.job.events_of(NextTier, rank=0)]

    def back_at(self) -> list[int]:
        """Iterations at which each recovery has come back; nothing that any replayed differs."""
        found = self.job.events_of(Recovered, rank=0)
        assert not any(event.differing for event in found)
        return [event.iteration for event in found]


def test_all_tiers_and_exits(cluster: Make, reference: Reference, tmp_path: Path) -> None:
    made = cluster(*FLAGS, '--sparse-ckpt-window', '3', *SETTLED, ranks=2)
    job = Job(made, tmp_path / 'dense')
    memory = job.job.memory
    end_with_windows(job, memory)
    end_with_a_dense_checkpoint(job, memory)
    # Windows are truncated: the dense checkpoint of iteration 20 is taken.
    job.dies('1:24:forward')
    for path in memory.rglob('0/window-*.window'):
        with open(path, 'r+b') as file:
            file.truncate(50_000)
    job.dies('1:29:forward')
    assert 'dense checkpoint of iteration 20' in job.tiers()[-1][0]
    assert 'successfully loaded checkpoint' in job.job.output(job.job.attempts - 1)
    # That of 25 is older than the newest window; then a worker dies after the last iteration.
    assert set(job.survive(*job.dense, fail_at='1:30:after-step')) == BOTH
    assert job.back_at()[3] == 28
    assert job.tiers()[-1] == (WHOLE_JOB, 'iteration 30 was the last one')
    assert differences(reference(*FLAGS, ranks=2), read_digest(job.job)) == []
    assert not memory.exists(), 'host memory is given back at a clean exit'


def end_with_windows(job: Job, memory: Path) -> None:
    """There is nothing else to go on from."""
    assert set(job.survive(*ENDS, fail_at='1:2:forward')) == BOTH
    assert job.tiers()[0] == (WHOLE_JOB, 'no window is complete on all ranks')
    assert job.back_at() == [], 'it started over'
    kept = f'| windows: kept in {memory} | go on: launch the job again'
    assert kept in job.said_at_its_end()
    # A worker dies when the others have left the loop.
    assert set(job.survive(*ENDS, fail_at='1:8:exit')) == BOTH
    assert job.back_at() == [4, 8]
    assert job.tiers()[-1][0] == WHOLE_JOB
    assert memory.exists()


def end_with_a_dense_checkpoint(job: Job, memory: Path) -> None:
    """It has all that is needed, and the windows are removed."""
    assert job.survive(*job.dense, *ENDS) == {}
    assert job.back_at()[-1] == 12
    assert job.said_at_its_end().endswith(f'| windows: removed | go on: {go_on(job)} |')
    assert not memory.exists()


def go_on(job: Job) -> str:
    return job.dense[1].replace('=', ' ')
