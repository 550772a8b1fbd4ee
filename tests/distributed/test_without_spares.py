# SPDX-License-Identifier: Apache-2.0
"""A node is lost and there is no spare: its ranks are guests of other nodes until it returns.

Under `moevement launch`, with one worker on each emulated node; under Slurm:
`tests/unit/launch/test_guests.py`. Which host is chosen: `tests/unit/launch/test_seating.py`.
"""

import itertools
import statistics
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.events import Event, NextTier, Protected, Recovered, decode
from moevement_ext.launch.launch_config import LaunchConfig, StagedAction, StagedFault
from moevement_ext.launch.launcher_events import (
    FILE,
    AllStartAgain,
    GuestsSeated,
    JobFailed,
    JobRecovered,
    NodeLost,
    NodeSeated,
    WorkerLaunched,
)
from moevement_ext.launch.supervisor import Supervisor
from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.local_cluster import PROGRAM, launch
from tools.lab.evidence import kind_of

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(600)]

NOISE = '--hidden-dropout 0.1 --attention-dropout 0.1'
SHARDED = f'--bf16 --use-distributed-optimizer {NOISE}'
LAYOUTS = {
    'experts over all ranks': f'{SHARDED} --expert-model-parallel-size 4',
    'every rank has all experts': SHARDED,
    'pipeline': f'{SHARDED} --pipeline-model-parallel-size 2 --expert-model-parallel-size 2',
    'plain optimizer': f'--bf16 --expert-model-parallel-size 2 {NOISE}',
    'tensor': f'{SHARDED} --tensor-model-parallel-size 2 --sequence-parallel',
}
ROUTED = {'every rank has all experts', 'plain optimizer', 'tensor'}
"""Peers of these compute the micro-batches of guests."""
WIDE = LAYOUTS['experts over all ranks']
WINDOW = '--sparse-ckpt-window 3 --sparse-ckpt-replicas 1'
GUESTS = '--when-no-spare guests'


class Run(NamedTuple):
    """A job that ended, with its launcher's events."""

    job: Cluster
    code: int
    events: list[Event]

    @property
    def places(self) -> list[tuple[int, str]]:
        """Seats that hosts have taken, in the order of time."""
        found = [one for one in self.events if isinstance(one, NodeSeated | GuestsSeated)]
        return [(one.node, one.host) for one in found]

    @property
    def starts(self) -> Counter[int]:
        """Number of processes of each rank."""
        return Counter(event.rank for event in kind_of(self.events, WorkerLaunched))

    @property
    def said_by_rank_0(self) -> str:
        return (self.job.directory / 'logs' / 'rank0.log').read_text('utf-8')

    def assert_exact(self, expected: dict) -> None:
        """No bit differs from a job that never failed; no iteration is lost; no file is left."""
        assert self.code == 0
        assert differences(expected, read_digest(self.job)) == []
        ranks = range(self.job.ranks)
        recovered = [one for rank in ranks for one in self.job.events_of(Recovered, rank)]
        assert recovered
        assert all(one.scope == 'localized' and not one.differing for one in recovered)
        assert not self.job.memory.exists()


def run(job: Cluster, flags: str) -> Run:
    logs = job.directory / 'logs'
    code, _ = launch(job, '--log-dir', str(logs), *flags.split())
    return Run(job, code, launched(job))


def made(cluster: Make, flags: str, *more: str) -> Cluster:
    return cluster(*flags.split(), *WINDOW.split(), *more, ranks=4, nodes=4)


def test_ranks_of_a_lost_node_are_guests_until_it_returns(
    cluster: Make, reference: Reference
) -> None:
    flags = f'{WIDE} --train-iters 20'
    done = run(made(cluster, flags), f'{GUESTS} --lose-node 3@6 --return-node 3@12')
    done.assert_exact(reference(*flags.split()))
    assert done.places == [(3, 'node1'), (3, 'node3')]
    assert done.starts == {0: 1, 1: 1, 2: 1, 3: 3}
    assert 'ranks [3] are guests and compute for themselves' in done.said_by_rank_0
    assert [event.exposed for event in kind_of(done.events, GuestsSeated)] == [0]
    nodes = [event.node for event in done.job.events_of(Protected, 3)]
    assert nodes == ['node3', 'node1', 'node3']


@pytest.mark.thorough
def test_job_waits_for_a_lost_node(cluster: Make, reference: Reference) -> None:
    """All workers end meanwhile; an emulated node that a job waits for returns at once."""
    flags = f'{WIDE} --train-iters 14'
    done = run(made(cluster, flags), '--when-no-spare wait --lose-node 1@6')
    assert done.code == 0
    assert differences(reference(*flags.split()), read_digest(done.job)) == []
    assert [event.nodes for event in kind_of(done.events, AllStartAgain)] == [0, 4]
    assert done.starts == dict.fromkeys(range(4), 2)
    assert not done.job.memory.exists()


@pytest.mark.thorough
def test_nodes_are_lost_until_one_is_left(cluster: Make, reference: Reference) -> None:
    """Then all workers die at once, and go on where they were."""
    flags = f'{WIDE} --train-iters 26'
    lost = '--lose-node 3@6 2@10 1@14 --kill 0@19 1@19 2@19 3@19'
    done = run(made(cluster, flags), f'{GUESTS} {lost}')
    assert done.code == 0
    assert differences(reference(*flags.split()), read_digest(done.job)) == []
    assert done.places[:2] == [(3, 'node1'), (2, 'node0')]
    assert sorted(done.places[2:]) == [(1, 'node0'), (3, 'node0')]
    assert [event.node for event in kind_of(done.events, NodeLost)] == [3, 2, 1, 3]
    assert [event.exposed for event in kind_of(done.events, GuestsSeated)][:2] == [0, 0]
    assert kind_of(done.events, GuestsSeated)[-1].exposed > 0
    assert done.starts == {0: 2, 1: 3, 2: 3, 3: 4}
    assert not done.job.memory.exists()


@pytest.mark.thorough
@pytest.mark.parametrize('layout', LAYOUTS)
def test_guests_keep_the_bits_in_every_layout(
    layout: str, cluster: Make, reference: Reference
) -> None:
    """A second node is lost while guests live; one returns."""
    flags = f'{LAYOUTS[layout]} --train-iters 24'
    done = run(made(cluster, flags), f'{GUESTS} --lose-node 3@6 1@11 --return-node 1@16')
    done.assert_exact(reference(*flags.split()))
    peers_compute = 'their peers compute their micro-batches' in done.said_by_rank_0
    assert peers_compute is (layout in ROUTED)
    assert done.places[0] == (3, 'node1')
    assert sorted(seat for seat, _ in done.places[1:3]) == [1, 3]
    assert done.places[3] == (1, 'node1')


@pytest.mark.thorough
@pytest.mark.parametrize(
    ('staged', 'phases'),
    [
        ('--kill 3@10', []),
        ('--stop 3@10', []),
        ('', ['load']),
        ('', ['catch-up', 'replayed']),
        ('', ['forward']),
    ],
    ids=['dies', 'hangs', 'loads', 'replays', 'before its first window'],
)
def test_guest_that_dies_is_replaced_where_it_was(
    staged: str,
    phases: list[str],
    cluster: Make,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = f'{WIDE} --train-iters 20'
    monkeypatch.setenv('MOEVEMENT_FAIL_AT', strikes(phases))
    job = made(cluster, flags, '--sparse-ckpt-hang-timeout', '5')
    done = run(job, f'{GUESTS} --lose-node 3@6 {staged}')
    done.assert_exact(reference(*flags.split()))
    assert done.places == [(3, 'node1')]
    assert done.starts[3] == 2 + max(1, len(phases))


def strikes(phases: list[str]) -> str:
    """`MOEVEMENT_FAIL_AT` for the guest's first processes, soon after iteration 6."""
    return ','.join(
        f'3:{iteration}:{phase}:{attempt}'
        for attempt, phase in enumerate(phases, start=1)
        for iteration in range(3, 10)
    )


@pytest.mark.thorough
@pytest.mark.parametrize('phase', ['load', 'forward'])
def test_host_of_guests_is_lost_too(
    phase: str, cluster: Make, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soon after their recovery, in which the guest has died once."""
    flags = f'{WIDE} --train-iters 20'
    monkeypatch.setenv('MOEVEMENT_FAIL_AT', strikes([phase]))
    done = run(made(cluster, flags), f'{GUESTS} --lose-node 3@6 1@11')
    done.assert_exact(reference(*flags.split()))
    assert done.places[0] == (3, 'node1')
    assert dict(done.places[1:]).keys() == {1, 3}


@pytest.mark.thorough
def test_node_that_returns_at_once_has_no_guests(cluster: Make, reference: Reference) -> None:
    flags = f'{WIDE} --train-iters 16'
    done = run(made(cluster, flags), f'{GUESTS} --lose-node 1@6 --return-node 1@6')
    done.assert_exact(reference(*flags.split()))
    assert done.places == [(1, 'node1')]
    assert done.starts == {0: 1, 1: 2, 2: 1, 3: 1}


@pytest.mark.thorough
@pytest.mark.parametrize('flags', ['', GUESTS])
def test_job_ends_without_guests_or_room_for_them(flags: str, cluster: Make) -> None:
    budget = '--sparse-ckpt-host-memory-gb', '0.006'  # for one node's ranks, not for two
    job = made(cluster, f'{WIDE} --train-iters 20', *budget)
    done = run(job, f'{flags} --lose-node 3@6')
    assert done.code == EXIT_WHOLE_JOB
    assert done.places == []
    [failed] = kind_of(done.events, JobFailed)
    assert 'node 3 of the job is lost, and no spare node is left' in failed.reason
    refused = failed.reason.count('exceeds --sparse-ckpt-host-memory-gb 0.006')
    assert refused == (3 if flags else 0)


@pytest.mark.thorough
def test_node_returns_while_its_guests_are_set_up(
    cluster: Make, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = f'{WIDE} --train-iters 16'
    job = made(cluster, flags)
    for name, value in job.site().items():
        monkeypatch.setenv(name, value)
    logs, program = job.directory / 'logs', job.directory / 'program.py'
    job.directory.mkdir()
    program.write_text(PROGRAM.format(imported='', called='pass'))
    faults = (StagedFault(StagedAction.LOSE_NODE, 3, 6),)
    settings = {'nodes': 4, 'spares': 1, 'log_dir': logs, 'faults': faults}
    config = LaunchConfig(str(program), tuple(job.flags), when_no_spare='guests', **settings)

    def note(event: Event) -> None:
        if isinstance(event, WorkerLaunched) and (event.rank, event.restarts) == (3, 1):
            supervisor._starter.return_node(3)

    supervisor = Supervisor(config, note)
    done = Run(job, supervisor.run(), launched(job))
    done.assert_exact(reference(*flags.split()))
    assert done.places == [(3, 'node1'), (3, 'node3')]
    assert done.starts == {0: 1, 1: 1, 2: 1, 3: 3}


CYCLES = 20


class Sample(NamedTuple):
    """What the launcher and the ranks that stay hold, and the host memory of the run."""

    returns: int
    launcher: tuple[int, int]
    """Descriptors and threads."""
    ranks: list[tuple[int, int]]
    shared: int


@pytest.mark.thorough
def test_losses_and_returns_leave_nothing_behind(cluster: Make, reference: Reference) -> None:
    starts = range(6, 6 + 8 * CYCLES, 8)
    lost = ' '.join(f'3@{at}' for at in starts)
    back = ' '.join(f'3@{at + 4}' for at in starts)
    flags = f'{WIDE} --train-iters {starts[-1] + 12}'
    job = made(cluster, flags)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, job, f'{GUESTS} --lose-node {lost} --return-node {back}')
        samples = []
        while not wait([running], 0.1).done:
            found = sample(job)
            if found is not None:
                samples.append(found)
        done = running.result()
    done.assert_exact(reference(*flags.split()))
    assert done.places == [(3, host) for _ in range(CYCLES) for host in ('node1', 'node3')]
    half = CYCLES // 2
    early = medians([one for one in samples if 4 <= one.returns < half])
    late = medians([one for one in samples if half <= one.returns < CYCLES])
    *held, shared = zip(early, late, strict=True)
    assert all(after <= before + 1 for before, after in held), (early, late)
    assert shared[1] == shared[0]


def sample(job: Cluster) -> Sample | None:
    """None while a process of the job starts or ends."""
    with suppress(psutil.NoSuchProcess, FileNotFoundError, KeyError, ValueError):
        [launcher] = [
            one
            for one in psutil.Process().children()
            if 'moevement_ext.launch.command_line' in one.cmdline()
        ]
        events = launched(job)
        pids = {one.rank: one.pid for one in kind_of(events, WorkerLaunched)}
        ranks = [psutil.Process(pids[rank]) for rank in (0, 1, 2)]
        held = [(one.num_fds(), one.num_threads()) for one in (launcher, *ranks)]
        files = [path.stat().st_blocks for path in job.memory.rglob('*') if path.is_file()]
        return Sample(len(kind_of(events, NodeSeated)), held[0], held[1:], 512 * sum(files))
    return None


def launched(job: Cluster) -> list[Event]:
    return list(decode((job.directory / 'logs' / FILE).read_bytes()))


def medians(samples: list[Sample]) -> list[int]:
    """Of everything, over several moves."""
    columns = [
        (*one.launcher, *itertools.chain.from_iterable(one.ranks), one.shared) for one in samples
    ]
    return [int(statistics.median(column)) for column in zip(*columns, strict=True)]


@pytest.mark.thorough
@pytest.mark.parametrize('on_disk', [True, False], ids=['disk', 'dense checkpoint'])
def test_node_with_both_copies_of_windows_is_lost(
    on_disk: bool, cluster: Make, reference: Reference, tmp_path: Path
) -> None:
    """The log has said before what this costs; the job goes on from its disk, or else from the
    newest dense checkpoint, of iteration 15 (upstream restores no random numbers of experts)."""
    flags = f'{WIDE if on_disk else SHARDED} --train-iters 24'
    (tmp_path / 'kept').mkdir()
    kept = ['--sparse-ckpt-disk', str(tmp_path / 'kept')]
    if not on_disk:
        dense = f'--save {tmp_path}/kept --load {tmp_path}/kept --save-interval 5'
        kept = [*dense.split(), '--ckpt-format', 'torch_dist']
    job = made(cluster, flags, *kept)
    done = run(job, f'{GUESTS} --lose-node 3@6 1@11 0@16')
    assert done.code == 0
    assert differences(reference(*flags.split()), read_digest(job)) == []
    before = kind_of(done.events, GuestsSeated)[:3]
    assert 'node0' in {event.host for event in before if event.exposed}
    if on_disk:
        assert 'from disk' in kind_of(done.events, JobRecovered)[-1].line
    else:
        assert job.events_of(NextTier)[-1].tier == 'the dense checkpoint of iteration 15'
    assert [event.scope for event in job.events_of(Recovered)][:2] == ['localized', 'localized']
