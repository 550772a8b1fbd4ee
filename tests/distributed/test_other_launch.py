# SPDX-License-Identifier: Apache-2.0
"""A node's agent is restarted with another flag by mistake; its workers are refused."""

import os
import signal
import subprocess
from contextlib import ExitStack

import pytest

from moevement_ext.events import Recovered, WindowPersisted, WorkerStarted
from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import free_port, tails
from tests.distributed.harness.torchrun import agent
from tests.distributed.test_torchrun import START_S, prepared, wait_until

pytestmark = pytest.mark.timeout(1200)

FLAGS = '--bf16 --clip-grad 0.5 --train-iters 40'.split()
"""Of two ranks that hold the same: a new process would copy all it needs from the other."""


LAUNCH = (
    '--nnodes 2 --nproc-per-node 1 --max-restarts 0 --rdzv-backend static --master-addr 127.0.0.1'
).split()


@pytest.mark.launcher
@pytest.mark.thorough
def test_replacement_with_other_flags_is_refused_before_it_copies_state(
    cluster: Make, reference: Reference
) -> None:
    job = prepared(cluster, FLAGS, ranks=2)
    launch = [*LAUNCH, '--master-port', str(free_port()), '--node-rank']
    log = {name: job.directory / f'{name}.log' for name in ('first', 'lost', 'other', 'right')}

    def start(stack: ExitStack, node: int, name: str, *more: str) -> subprocess.Popen[bytes]:
        flags = [*job.flags, *more]
        started = agent([*launch, str(node)], flags, log[name], MOEVEMENT_NODE=f'node{node}')
        return stack.enter_context(started)

    logs = list(log.values())[:2]
    with ExitStack() as stack:
        first, lost = start(stack, 0, 'first'), start(stack, 1, 'lost')
        wait_until(lambda: all(job.events_of(WindowPersisted, rank) for rank in range(2)), logs)
        lost.kill()
        os.kill(job.events_of(WorkerStarted, 1)[-1].pid, signal.SIGKILL)

        assert start(stack, 1, 'other', '--clip-grad', '0.05').wait(START_S) != 0
        said = 'rank 1 has other settings than the job it joins: --clip-grad: the job 0.5, rank 1'
        assert f'{said} 0.05. Launch it' in log['other'].read_text(errors='replace'), tails(logs)
        assert f'recovering: {said}' in log['first'].read_text(errors='replace'), tails(logs)
        assert not job.events_of(Recovered, 0)

        right = start(stack, 1, 'right')
        for process in (right, first):
            assert process.wait(START_S) == 0, tails(list(log.values()))
    (recovered,) = job.events_of(Recovered, 0)
    assert (recovered.scope, recovered.copied) == ('localized', [1])
    assert differences(reference(*FLAGS, ranks=2), read_digest(job)) == []
