# SPDX-License-Identifier: Apache-2.0
"""Long jobs whose workers are SIGKILLed again and again; only the stages that are lost replay."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from megatron.core.dist_checkpointing import load_common_state_dict

from moevement_ext.coordinator import keeper
from moevement_ext.events import (
    FailureDetected,
    Protected,
    Recovered,
    RecoveryStarted,
    WorkerStarted,
)
from tests.distributed.conftest import LINES, ON_BOTH_BACKENDS, Make, Reference
from tests.distributed.harness.cluster import NCCL_LIKE, Cluster, free_port
from tests.distributed.harness.faults import SETTLED, Fault, InTurn, deaths, fault_all
from tests.distributed.harness.output import scraped, upstream_lines
from tests.distributed.harness.setups import BF16, PP2, PP_EP, UNTIED, setups
from tests.distributed.probes import holding
from tests.distributed.test_whole_job_recovery import skipped_by
from tests.support.quick import with_quick
from tests.support.readable import dies

pytestmark = pytest.mark.timeout(1800)

FP32 = '--use-distributed-optimizer'
"""Where bits of bf16 are not the subject: some CPUs have no instructions for it."""

LAST = 47
LAST_VICTIM = '1'
WINDOW = 3
LOADERS = 1
SAVES = 8
OPERATIONS = 'num_floating_point_operations_so_far'
EVERYTHING = (
    f'{BF16} {PP_EP} {UNTIED} --num-layers 2 --train-iters {LAST} --hidden-dropout 0.1 '
    '--eval-interval 4 --eval-iters 2'
).split()
IN_AN_ITERATION = (
    Fault('in p2p', '1:8:p2p'),
    Fault('in gradient reduction', '0:11:reduce'),
    Fault('in a dense save', '3:16:save'),
    Fault('between norm and step', '1:20:norm'),
    Fault('in the middle of the step', '0:23:step'),
    Fault('in an evaluation, twice', '2:28:evaluate-forward,3:28:evaluate-forward'),
    Fault('after the step', '1:31:after-step'),
    Fault('after a dense save', '2:40:saved'),
    Fault('while replicating', '1:44:replicate'),
)


class LastIteration:
    """What is seen from outside when all faults are over and no rank begins the last iteration."""

    def __init__(self, job: Cluster) -> None:
        self.job = job
        self.metrics: dict[tuple[str, ...], float] = {}
        self.loaders: list[list[psutil.Process]] = []
        holding.file(job.directory, LAST).touch()

    def steps(self, workers: list, start: Callable) -> Iterator[Callable[[], bool]]:
        yield lambda: holding.all_wait(self.job.directory, LAST, self.job.ranks)
        self.look_at_loaders(workers)
        yield self.all_have_reported
        holding.file(self.job.directory, LAST).unlink()

    def look_at_loaders(self, workers: list) -> None:
        """Each worker has its own, and those that died have left none: all had a session.

        Loaders have no connections, or peers of a dead worker would not notice.
        """
        living = {worker.pid for worker in workers}
        for pid in living:
            children = psutil.Process(pid).children(recursive=True)
            # Of rank 0 one is the coordinator, whose connections end with it.
            self.loaders.append([one for one in children if keeper.__name__ not in one.cmdline()])
        connections = [one.net_connections('tcp') for of in self.loaders for one in of]
        assert not any(one.status == psutil.CONN_ESTABLISHED for of in connections for one in of)
        events = [self.job.events_of(WorkerStarted, rank) for rank in range(self.job.ranks)]
        gone = {event.pid for started in events for event in started} - living
        assert len(gone) == sum(deaths(IN_AN_ITERATION).values())
        orphans = [pid for pid in psutil.pids() if session_of(pid) in gone]
        assert all(dies(pid) for pid in orphans)

    def all_have_reported(self) -> bool:
        """Each rank serves its metrics, also a replacement."""
        first = int(self.job.flags[self.job.flags.index('--sparse-ckpt-metrics') + 1])
        for rank in range(self.job.ranks):
            self.metrics |= scraped(first + rank)
        ranks = map(str, range(self.job.ranks))
        return all(self.metrics.get(('moevement_iteration', r)) == LAST - 1 for r in ranks)

    def check(self) -> None:
        for children in self.loaders:
            assert len(children) >= LOADERS
        for rank in map(str, range(self.job.ranks)):
            self.check_metrics(rank)

    def check_metrics(self, rank: str) -> None:
        """Of a process that has seen recoveries; a replacement has replayed."""
        seen = self.metrics
        assert seen['moevement_window_iterations', rank] == WINDOW
        assert 0 < seen['moevement_window_age_iterations', rank] <= 2 * WINDOW
        captured = seen['moevement_captured_bytes_total', rank]
        assert 0 < seen['moevement_slot_bytes', rank] < captured
        assert seen['moevement_exposed_seconds_total', rank] > 0
        assert seen['moevement_training_seconds_total', rank] > 0
        assert seen['moevement_host_memory_bytes', rank, 'own_windows'] > 0
        assert seen['moevement_recoveries_total', rank, 'localized'] >= 1
        assert seen['moevement_replayed_iterations_total', rank] >= 1
        assert seen['moevement_verified_operators_total', rank] > 0
        assert seen['moevement_differing_operators_total', rank] == 0
        if rank != LAST_VICTIM:
            assert seen['moevement_failures_detected_total', rank] >= 1


def session_of(pid: int) -> int:
    """Or -1 of a process that has ended."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def everything_on(cluster: Make) -> Cluster:
    job = cluster(*EVERYTHING, '--sparse-ckpt-window', str(WINDOW), *SETTLED)
    disk = job.directory / 'disk'
    disk.mkdir(parents=True)
    job.flags += ['--num-workers', str(LOADERS), '--sparse-ckpt-disk', str(disk)]
    job.flags += ['--save', str(job.directory / 'dense'), '--save-interval', str(SAVES)]
    job.flags += ['--sparse-ckpt-metrics', str(free_port())]
    job.flags += ['--sparse-ckpt-network-gb-per-s', '0.1']
    profile = '--profile --use-pytorch-profiler --profile-step-start 6 --profile-step-end 9'
    job.flags += [*profile.split(), '--tensorboard-dir', str(job.directory / 'board')]
    return job


def test_localized_recovery_with_all_features_on(cluster: Make, reference: Reference) -> None:
    """The launcher announces no death: survivors notice by themselves."""
    looks: list[LastIteration] = []

    def look(job: Cluster) -> InTurn:
        looks.append(LastIteration(job))
        return InTurn(looks[0].steps)

    expected = reference(*EVERYTHING)
    job = fault_all(
        lambda: everything_on(cluster),
        IN_AN_ITERATION,
        expected,
        meanwhile=look,
        announce=False,
        mutation='probes.holding:wait_to_be_let_on',
    )
    looks[0].check()
    # Each log line is upstream's own. Those of iterations that a fault ended late are missing.
    lines = set(upstream_lines(job, 0))
    assert lines <= set(expected[LINES])
    assert len(lines) >= len(set(expected[LINES])) - len(IN_AN_ITERATION)
    check_saves(job.directory / 'dense')


def check_saves(dense: Path) -> None:
    """Each was made, and none counts operations twice."""
    saved = [dense / f'iter_{iteration:07}' for iteration in (*range(SAVES, LAST, SAVES), LAST)]
    assert sorted(dense.glob('iter_*')) == saved
    counted = [load_common_state_dict(str(path))[OPERATIONS] for path in saved]
    assert counted[:-1] == [count * counted[0] for count in range(1, len(saved))]


FOUR_STAGES = f'{FP32} --pipeline-model-parallel-size 4 {UNTIED} --global-batch-size 2'
OF_OTHERS = (
    Fault('during detection', '1:8:forward,3:8:detect'),
    Fault('during regrouping', '1:13:forward,2:13:regroup'),
    Fault('when a stage has caught up and is connected', '1:17:forward,2:17:resume'),
    Fault('two adjacent stages at once', '1:22:forward,2:22:forward'),
    Fault('a far stage while it fetches', '0:26:forward', also=(3,)),
    Fault('far stages while it converts and catches up', '0:32:forward', also=(2, 3)),
    Fault('a far stage when it has caught up', '3:38:forward', also=(1,)),
    Fault('a neighbour while it catches up', '0:44:forward', also=(1,)),
)
WENT_ON = {(0, 25): 1, (0, 31): 2, (3, 37): 1, (0, 43): 0}
"""Through how many failures, by rank and iteration to which it replayed; see `probes.cascading`."""


def test_further_failures_during_recoveries(cluster: Make, reference: Reference) -> None:
    flags = f'{FOUR_STAGES} --train-iters 48'.split()
    job = fault_all(
        lambda: cluster(*flags, '--sparse-ckpt-window', '3', *SETTLED, nodes=4),
        OF_OTHERS,
        reference(*flags),
        mutation='probes.cascading:far_and_near_ones_die',
    )
    for (rank, target), times in WENT_ON.items():
        recovered = [e for e in job.events_of(Recovered, rank) if e.target == target]
        (went_on,) = (event.went_on for event in recovered)
        # More, if a survivor takes the death for two failures: it sees the connection end first.
        assert went_on >= times and bool(went_on) == bool(times), (rank, target)
        (back,) = {event.pid for event in recovered}
        began = [event for event in job.events_of(RecoveryStarted, rank) if event.pid == back]
        assert len(began) == (1 if times else 2), (rank, target)


OF_A_REPLACEMENT = (
    *OF_OTHERS[:3],
    Fault('while all connect', '0:22:forward,2:22:connect'),
    Fault('fetching', '1:28:forward,1:25:fetch'),
    Fault('loading', '1:34:forward,1:32:load'),
    Fault('converting', '1:40:forward,1:38:convert'),
    Fault('twice catching up', '1:44:forward,1:42:catch-up,1:43:catch-up', False),
    Fault('when it has caught up', '1:50:forward,1:49:replayed'),
    Fault('right after the recovery', '3:55:forward,3:55:forward'),
    Fault('a neighbour right after the recovery', '1:59:forward,2:59:backward'),
    Fault('two separate stages at once', '0:64:forward,2:64:forward'),
    Fault('while capturing', '3:68:capture'),
    Fault('while sealing', '0:71:seal'),
)


@pytest.mark.thorough
def test_deaths_of_replacements(cluster: Make, reference: Reference) -> None:
    flags = f'{FOUR_STAGES} --train-iters 74'.split()
    fault_all(
        lambda: cluster(*flags, '--sparse-ckpt-window', '3', *SETTLED, nodes=4),
        OF_A_REPLACEMENT,
        reference(*flags),
    )


TOGETHER = (
    Fault('two at once', '2:8:forward,3:8:forward'),
    Fault('another one while all convert', '2:14:forward,0:11:convert'),
    # Survivors may have captured iteration 18 anew: then nothing is left to compare with.
    Fault('another one while all catch up', '1:20:forward,3:18:catch-up', verified=False),
    Fault('another one when all have caught up', '3:26:forward,2:25:replayed'),
)


@ON_BOTH_BACKENDS
def test_all_stages_roll_back_together(backend: str, cluster: Make, reference: Reference) -> None:
    """In the processes that live; nothing is logged."""
    flags = f'{FP32} {PP_EP} {UNTIED} --num-layers 2 --train-iters 29'.split()
    together = ['--sparse-ckpt-window', '3', '--sparse-ckpt-recovery', 'global']
    job = fault_all(lambda: cluster(*flags, *together, *SETTLED), TOGETHER, reference(*flags))
    for rank in range(job.ranks):
        assert {event.scope for event in job.events_of(Recovered, rank)} == {'global'}
        assert all(event.stages == [0, 1] for event in job.events_of(Recovered, rank))
        assert all(e.host_memory['log_ring'] == 0 for e in job.events_of(Protected, rank))
    assert len(job.events_of(Recovered, 0)) > len(TOGETHER) - deaths(TOGETHER)[0]


PEERS = f'--bf16 {PP2} {UNTIED} --num-layers 2 --train-iters 26'.split()
COPIES = (
    Fault('copied from its peer', '1:8:forward', verified=False),
    Fault('the peer that was copied from', '0:12:forward', verified=False),
    Fault('both peers', '0:17:forward,1:17:forward'),
    Fault('all of a stage, and the memory of its node', '2:23:forward,3:23:forward', False),
)


def test_lost_peers_and_nodes(cluster: Make, reference: Reference) -> None:
    """Without the distributed optimizer a data-parallel peer holds the same state."""
    # The log is full until the window after a copy is persisted: that is not worth a wait.
    soon = ['max_wait=0.1']
    job = fault_all(
        lambda: cluster(*PEERS, '--sparse-ckpt-window', '3', *SETTLED, *soon),
        COPIES,
        reference(*PEERS),
        wipe=[1],
        mutation='probes.sealing:peers_die_together',
    )
    recovered = job.events_of(Recovered, rank=1)[-2:]
    assert [event.stages for event in recovered] == [[0], [1]]
    copies = [event.copied for event in job.events_of(Recovered, rank=1) if event.copied]
    assert copies == [[1], [0]]


# Flags; faults.
LAYOUTS = setups('long-localized')


@pytest.mark.parametrize('name', with_quick(LAYOUTS, 'virtual-stages-with-all-of-experts'))
def test_localized_recovery_in_other_layouts(
    name: str, cluster: Make, reference: Reference
) -> None:
    """All stages are lost together, and then either of them alone."""
    other = LAYOUTS[name]['dies']
    flags = [*LAYOUTS[name]['flags'].split(), '--train-iters', '20']
    faults = [Fault('one stage', '1:12:forward'), Fault('the other one', other)]
    expected = reference(*flags)
    fault_all(
        lambda: cluster(*flags, '--sparse-ckpt-window', '3', *SETTLED),
        faults,
        expected,
        lost_at='1:8:forward',
    )
    if '--fp16' in flags:
        assert skipped_by('\n'.join(expected[LINES])) & {6, 7}, 'one that is replayed by all'


LIKE_NCCL = f'--pipeline-model-parallel-size 4 {UNTIED} --train-iters 29'.split()
WAITED_FOR = (
    Fault('others send and receive', '1:8:p2p'),
    Fault('others wait in the norm', '2:14:optimizer'),
    Fault('while communicators are made', '0:20:forward,2:20:connect'),
    Fault('a GPU is lost by the death of another', '1:26:forward', also=(3,)),
)


def test_collectives_that_fail_like_nccl(cluster: Make, reference: Reference) -> None:
    job = fault_all(
        lambda: cluster(
            *LIKE_NCCL, '--sparse-ckpt-window', '3', *SETTLED, nodes=4, backend=NCCL_LIKE
        ),
        WAITED_FOR,
        reference(*LIKE_NCCL),
        mutation='mutations.nccl_like:hang_deaths_and_a_lost_gpu',
    )
    hang = job.events_of(FailureDetected, rank=0)[0]
    assert 'has waited for others for 1' in hang.reason
    costs_nothing = job.events_of(Recovered, rank=0)[0]
    # A busy machine may have kept one rank from committing: it is behind all others, and replaced.
    assert costs_nothing.replacements == costs_nothing.stages
    assert costs_nothing.stages in ([], [0], [1], [3]), 'the rank that hangs is not behind'
    if costs_nothing.stages != [3]:  # only the first process of rank 3 loses its GPU
        assert 'its GPU is lost: CUDA error' in job.output(0)
