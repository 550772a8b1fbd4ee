# SPDX-License-Identifier: Apache-2.0
"""The store is outside the training nodes, and dies."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from moevement_ext.events import (
    NextTier,
    Recovered,
    RecoveryStarted,
    WindowPersisted,
    WorkerStarted,
)
from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import Cluster, tails
from tests.distributed.harness.store import OutsideStore
from tests.distributed.harness.torchrun import agent
from tests.distributed.test_torchrun import START_S, wait_until

pytestmark = pytest.mark.timeout(1200)

FLAGS = (
    '--bf16 --pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --train-iters 40'
).split()
MUTATIONS = 'mutations.store'
LOST = 'sparse checkpointing: the store of the job is lost'


@pytest.fixture
def store() -> Iterator[OutsideStore]:
    made = OutsideStore()
    yield made
    assert made.close() == 128 + signal.SIGTERM


def job_in(store: OutsideStore, cluster: Make) -> Cluster:
    # On a loaded machine a window may be persisted late; no other is to be skipped for that.
    window = '--sparse-ckpt-window 3 max_wait=60'.split()
    job = cluster(*FLAGS, *window, '--sparse-ckpt-store', store.address, ranks=2)
    job.directory.mkdir(parents=True)
    return job


# The store dies


def has_begun_window_6(job: Cluster) -> bool:
    """Or will, on both ranks: what it waits for, that the one before is persisted, is known."""
    return all(
        3 in (window.start for window in job.events_of(WindowPersisted, rank)) for rank in range(2)
    )


def run_through_the_death_of(store: OutsideStore, job: Cluster, mutation: str) -> None:
    def fault(workers: list, start: Callable[[int], object]) -> None:
        if not struck and has_begun_window_6(job):
            struck.append(True)
            store.lose()

    struck: list[bool] = []
    counts = job.survive(
        fault=fault,
        announce=False,
        timeout_s=500.0,
        mutation=f'{MUTATIONS}:{mutation}',
    )
    assert counts.keys() == {0, 1}


def check_nothing_is_lost(job: Cluster) -> None:
    """What was committed is what the converted window comes to."""
    for rank in range(job.ranks):
        (left,) = job.events_of(NextTier, rank)
        (begun,) = job.events_of(RecoveryStarted, rank)
        (recovered,) = job.events_of(Recovered, rank)
        assert recovered.scope != 'localized'
        assert begun.dense_at == left.iteration == recovered.iteration


@pytest.mark.thorough
def test_store_loss_loses_no_committed_iteration(
    store: OutsideStore, cluster: Make, reference: Reference
) -> None:
    job = job_in(store, cluster)
    run_through_the_death_of(store, job, 'waits_in_iteration_7_until_the_store_is_lost')
    check_nothing_is_lost(job)
    assert job.events_of(RecoveryStarted)[0].dense_at == 8
    assert LOST in job.output(0)
    assert differences(reference(*FLAGS, ranks=2), read_digest(job)) == []


@pytest.mark.mutation
@pytest.mark.thorough
def test_exit_in_the_middle_of_a_window_loses_that_window(
    store: OutsideStore, cluster: Make
) -> None:
    job = job_in(store, cluster)
    run_through_the_death_of(store, job, 'ends_in_the_middle_of_a_window')
    with pytest.raises(AssertionError):
        check_nothing_is_lost(job)
    assert job.events_of(RecoveryStarted)[0].dense_at == 5


# Under torchrun


class Nodes:
    """Agents of two nodes, one worker each."""

    def __init__(self, job: Cluster, stack: ExitStack) -> None:
        self._job = job
        self._stack = stack
        self._stall = job.directory / 'stall'
        self.logs = [job.directory / f'agent{node}.log' for node in range(2)]
        self.agents = [self.start(node, self.logs[node]) for node in range(2)]

    def start(self, node: int, log: Path):
        launch = ['--nnodes', '2', '--nproc-per-node', '1', '--max-restarts', '2']
        return self._stack.enter_context(
            agent(
                [*launch, '--node-rank', str(node)],
                self._job.flags,
                log,
                module='moevement_ext.launch.torchrun',
                MOEVEMENT_NODE=f'node{node}',
                MOEVEMENT_STALL_FILE=str(self._stall),
            )
        )

    def stall_once_windows_are_safe(self) -> Path:
        """The first rank waits as long as the file is there."""
        job = self._job
        wait_until(
            lambda: all(job.events_of(WindowPersisted, rank) for rank in range(2)), self.logs
        )
        file = Path(f'{self._stall}.{job.events_of(WorkerStarted)[0].pid}')
        file.touch()
        return file


@pytest.mark.launcher
def test_job_survives_the_loss_of_the_first_node_and_its_agent(
    store: OutsideStore, cluster: Make, reference: Reference
) -> None:
    job = job_in(store, cluster)
    with ExitStack() as stack:
        nodes = Nodes(job, stack)
        stalled = nodes.stall_once_windows_are_safe()
        nodes.agents[0].kill()
        os.kill(job.events_of(WorkerStarted)[0].pid, signal.SIGKILL)
        stalled.unlink()
        again = nodes.start(0, job.directory / 'agent0-again.log')
        for process in (again, nodes.agents[1]):
            assert process.wait(START_S) == 0, tails(nodes.logs)
    assert differences(reference(*FLAGS, ranks=2), read_digest(job)) == []
    assert [len(job.events_of(WorkerStarted, rank)) for rank in range(2)] == [2, 1]
    for rank in range(2):
        (recovered,) = job.events_of(Recovered, rank)
        assert (recovered.scope, recovered.stages) == ('localized', [0])


@pytest.mark.thorough
def test_torchrun_agents_continue_in_a_new_store(
    store: OutsideStore, cluster: Make, reference: Reference
) -> None:
    job = job_in(store, cluster)
    with ExitStack() as stack:
        nodes = Nodes(job, stack)
        stalled = nodes.stall_once_windows_are_safe()
        store.lose()
        wait_until(lambda: all(LOST in log.read_text() for log in nodes.logs), nodes.logs)
        stalled.unlink()
        for process in nodes.agents:
            assert process.wait(START_S) == 0, tails(nodes.logs)
    assert differences(reference(*FLAGS, ranks=2), read_digest(job)) == []
    check_nothing_is_lost(job)
