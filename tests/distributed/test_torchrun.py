# SPDX-License-Identifier: Apache-2.0
"""The real launcher: torchrun restarts dead workers, which recover; and what it launches."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from moevement_ext.events import (
    FailureDetected,
    NextTier,
    Protected,
    Recovered,
    WindowPersisted,
    WorkerStarted,
)
from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import NCCL_LIKE, ROOT, Cluster, free_port, tails
from tests.distributed.harness.faults import SETTLED
from tests.distributed.harness.ports import listens
from tests.distributed.harness.setups import TWO_STAGES as TWELVE
from tests.distributed.harness.torchrun import agent

pytestmark = pytest.mark.timeout(1200)

TWO_STAGES = (
    '--bf16 --pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --train-iters 40'
).split()
"""Many iterations, for faults in the middle that are injected from outside."""
SEATS = ('--nnodes 2:3 --nproc-per-node 1 --max-restarts 9 --rdzv-backend moevement').split()
START_S = 400.0
"""Processes import torch and Megatron, twice, on perhaps two cores that others use, too."""


@pytest.mark.thorough
def test_one_agent_restarts_all_workers(cluster: Make, reference: Reference) -> None:
    job = prepared(cluster, TWO_STAGES, ranks=2)
    launch = ['--standalone', '--nproc-per-node', '2', '--max-restarts', '2']
    log = job.directory / 'agent.log'
    with agent(launch, job.flags, log, MOEVEMENT_FAIL_AT='1:8:backward') as process:
        assert process.wait(START_S) == 0, tails([log])
    check_recovered(job, reference(*TWO_STAGES, ranks=2))
    assert 'recovery restarts the whole job: the one agent of torchrun' in log.read_text()


def started(
    stack: ExitStack, job: Cluster, logs: list[Path], **more: str
) -> list[subprocess.Popen[bytes]]:
    """Two agents with one worker each."""
    launch = (
        f'--nnodes 2 --nproc-per-node 1 --max-restarts 2 --rdzv-backend static '
        f'--master-addr 127.0.0.1 --master-port {free_port()} --node-rank'
    ).split()
    return [
        stack.enter_context(
            agent([*launch, str(n)], job.flags, logs[n], MOEVEMENT_NODE=f'node{n}', **more)
        )
        for n in range(2)
    ]


@pytest.mark.thorough
def test_stopped_worker_is_killed_and_replaced(cluster: Make, reference: Reference) -> None:
    """Its agent sees nothing of it; there is no other worker on its node."""
    job = prepared(cluster, [*TWO_STAGES, '--sparse-ckpt-hang-timeout', '8'], ranks=2)
    logs = [job.directory / f'agent{node}.log' for node in range(2)]
    with ExitStack() as stack:
        agents = started(stack, job, logs)
        wait_until(lambda: all(job.events_of(WindowPersisted, rank) for rank in range(2)), logs)
        stopped = job.events_of(WorkerStarted, 1)[0].pid
        os.kill(stopped, signal.SIGSTOP)
        for process in agents:
            assert process.wait(START_S) == 0, tails(logs)
    assert differences(reference(*TWO_STAGES, ranks=2), read_digest(job)) == []
    said = f'rank 1 (pid {stopped}) has sent no heartbeat for 8 s: killed'
    assert said in logs[1].read_text()
    assert [len(job.events_of(WorkerStarted, rank)) for rank in range(2)] == [1, 2]
    for rank in range(2):
        (recovered,) = job.events_of(Recovered, rank)
        assert recovered.localized and recovered.stages == [1]


@pytest.mark.thorough
@pytest.mark.launcher
def test_standby_node_of_plain_torchrun_goes_on_from_replicas(
    cluster: Make, reference: Reference
) -> None:
    """A node is lost with its agent and its memory; another one has the store."""
    job, port = prepared(cluster, TWO_STAGES, ranks=2), free_port()
    launch = [*SEATS, '--rdzv-endpoint', f'127.0.0.1:{port}']
    logs = [job.directory / f'agent{node}.log' for node in range(3)]
    agents: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as stack:
        for node, log in enumerate(logs):
            started = agent(launch, job.flags, log, MOEVEMENT_NODE=f'node{node}')
            agents[f'node{node}'] = stack.enter_context(started)
            wait_until(lambda: listens(port), logs)
        wait_until(lambda: all(job.events_of(WindowPersisted, rank) for rank in range(2)), logs)
        nodes = [job.events_of(Protected, rank)[0].node for rank in range(2)]
        lost = next(rank for rank in range(2) if nodes[rank] != 'node0')
        os.kill(job.events_of(WorkerStarted, lost)[0].pid, signal.SIGKILL)
        agents.pop(nodes[lost]).kill()
        shutil.rmtree(job.memory / nodes[lost])
        for process in agents.values():
            assert process.wait(START_S) == 0, tails(logs)
    assert differences(reference(*TWO_STAGES, ranks=2), read_digest(job)) == []
    (stands_by,) = agents.keys() - nodes
    assert [one.node for one in job.events_of(Protected, lost)] == [nodes[lost], stands_by]
    for rank in range(2):
        (recovered,) = job.events_of(Recovered, rank)
        assert recovered.localized and recovered.stages == [lost]
    assert not job.events_of(NextTier, lost)


NCCL_LIKE_PROGRAM = """
import pretrain_gpt
from tests.distributed.harness import nccl_like
nccl_like.install()
pretrain_gpt.main()
"""


@pytest.mark.thorough
@pytest.mark.timed
@pytest.mark.parametrize('victim', [0, 1])
def test_death_is_known_within_two_seconds_where_no_collective_fails(
    victim: int, cluster: Make, reference: Reference, tmp_path: Path
) -> None:
    """As with NCCL. Rank 0 keeps the coordinator, as the agents are torchrun's own."""
    job = prepared(cluster, TWO_STAGES, ranks=2, backend=NCCL_LIKE)
    program = tmp_path / 'program.py'
    program.write_text(NCCL_LIKE_PROGRAM)
    logs = [job.directory / f'agent{node}.log' for node in range(2)]
    path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
    with ExitStack() as stack:
        agents = started(stack, job, logs, program=str(program), PYTHONPATH=path)
        wait_until(lambda: all(job.events_of(WindowPersisted, rank) for rank in range(2)), logs)
        struck_at = time.time()
        os.kill(job.events_of(WorkerStarted, victim)[0].pid, signal.SIGKILL)
        for process in agents:
            assert process.wait(START_S) == 0, tails(logs)
    assert differences(reference(*TWO_STAGES, ranks=2), read_digest(job)) == []
    (failure,) = job.events_of(FailureDetected, 1 - victim)
    assert failure.time - struck_at < 2.0, failure
    (recovered,) = job.events_of(Recovered, 1 - victim)
    assert recovered.localized and recovered.stages == [victim]


TWO_REPLICAS = '--bf16 --clip-grad 0.5 --train-iters 40'.split()
"""Two ranks that hold the same: a new process would copy all it needs from the other."""
STATIC = (
    '--nnodes 2 --nproc-per-node 1 --max-restarts 0 --rdzv-backend static --master-addr 127.0.0.1'
).split()


@pytest.mark.launcher
@pytest.mark.thorough
def test_replacement_with_other_flags_is_refused_before_it_copies_state(
    cluster: Make, reference: Reference
) -> None:
    """A node's agent is restarted with another flag by mistake."""
    job = prepared(cluster, TWO_REPLICAS, ranks=2)
    launch = [*STATIC, '--master-port', str(free_port()), '--node-rank']
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
        assert said not in log['first'].read_text(errors='replace'), 'it has taken no place'
        assert not job.events_of(Recovered, 0)

        right = start(stack, 1, 'right')
        for process in (right, first):
            assert process.wait(START_S) == 0, tails(list(log.values()))
    (recovered,) = job.events_of(Recovered, 0)
    assert (recovered.scope, recovered.copied) == ('localized', [1])
    assert differences(reference(*TWO_REPLICAS, ranks=2), read_digest(job)) == []


def test_nodes_without_a_secret_recover_the_whole_job_from_their_own_memory(
    cluster: Make, reference: Reference
) -> None:
    """A launcher gives the workers no secret, as torchrun."""
    job = cluster(*TWELVE, '--sparse-ckpt-window', '3', *SETTLED, ranks=2)
    job.gives_secret = False
    assert set(job.survive(fail_at='1:8:forward')) == {0, 1}
    assert differences(reference(*TWELVE, ranks=2), read_digest(job)) == []
    said = job.output(0)
    assert 'MOEVEMENT_SECRET is not set' in said and 'replicas: 0' in said
    assert not job.memory.exists(), 'host memory is given back at a clean exit'


def prepared(cluster: Make, flags: list[str], ranks: int, **more: str) -> Cluster:
    job = cluster(*flags, '--sparse-ckpt-window', '2', ranks=ranks, **more)
    job.directory.mkdir(parents=True)
    return job


def check_recovered(job: Cluster, fault_free: dict) -> None:
    assert differences(fault_free, read_digest(job)) == []
    for rank in range(job.ranks):
        first, second = job.events_of(WorkerStarted, rank)
        assert first.pid != second.pid
        assert len(job.events_of(Recovered, rank)) == 1
    assert not job.memory.exists()


def wait_until(condition: Callable[[], bool], logs: list[Path]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline, tails(logs)
        time.sleep(0.02)


# What is launched


@pytest.mark.parametrize('sparse', [False, True])
def test_upstream_is_unmodified_without_the_flag(sparse: bool, cluster: Make) -> None:
    job = cluster('--bf16', '--train-iters', '1', sparse=sparse, ranks=1)
    where = job.flags.index('--sparse-ckpt-digest')
    del job.flags[where : where + 2]
    job.finish(mutation='probes.launch:print_replaced_functions')
    (found,) = re.findall(r'^replaced: (.*)$', job.output(0), re.MULTILINE)
    replaced = json.loads(found)
    assert ('megatron.training.training.train_step' in replaced) is sparse is bool(replaced)
