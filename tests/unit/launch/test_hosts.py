# SPDX-License-Identifier: Apache-2.0
import mmap
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.events import Event
from moevement_ext.launch import child, node, remote
from moevement_ext.launch.launch_config import StagedAction, StagedFault
from moevement_ext.launch.launcher_events import (
    NodeLost,
    NodeReady,
    NodeSeated,
    SpareReady,
    WorkerLaunched,
)
from moevement_ext.memory import reservation
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.reservation import ReservedPages
from moevement_ext.replicate.secret import given_in, of_coordinator
from moevement_ext.system import leaving
from tests.support.readable import dies
from tests.unit.launch.conftest import ended, failure, starts_a_thread, unkillable
from tests.unit.launch.on_hosts import SlurmJob
from tests.unit.memory.samples import tmpfs_directory

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]
JOB = SlurmJob


def test_workers_run_on_their_hosts(
    job: SlurmJob, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('OMP_NUM_THREADS', '3')
    for name in ('CUDA_DEVICE_MAX_CONNECTIONS', 'TORCHDYNAMO_DISABLE'):
        monkeypatch.delenv(name, raising=False)
    job.finish_when = lambda: len(job.started()) == 4
    flags = ('3.0=print:hello', '--tensor-model-parallel-size', '2')
    assert job.on_hosts('ab', *flags, nodes=2, workers_per_node=2).run() == 0
    assert job.seated() == [('a', 0), ('b', 1)]
    starter: Any = job.running._starter
    keeper = starter._keeper
    for rank in range(4):
        seen = job.attempt(rank)['env']
        expected = {
            'RANK': str(rank),
            'LOCAL_RANK': str(rank % 2),
            'GROUP_RANK': str(rank // 2),
            'WORLD_SIZE': '4',
            'LOCAL_WORLD_SIZE': '2',
            'MASTER_ADDR': socket.gethostname(),
            'MASTER_PORT': str(job.running.store.port),
            'MOEVEMENT_COORDINATOR': f'{socket.gethostname()}:{keeper.address[1]}',
            'MOEVEMENT_NODE': 'ab'[rank // 2],
            'OMP_NUM_THREADS': '3',
            'CUDA_DEVICE_MAX_CONNECTIONS': '1',  # because of tensor parallelism
            'TORCHELASTIC_RESTART_COUNT': '0',
            'TORCHDYNAMO_DISABLE': None,  # the launcher's lack of a GPU is not passed on
        }
        assert {name: seen.get(name) for name in expected} == expected
        assert keeper._secret == of_coordinator(given_in(seen))
        assert 'MOEVEMENT_SUPERVISOR' not in seen
    assert '[rank 3] hello\n' in capfd.readouterr().out


def test_restart_of_all_workers_uses_the_new_store(job: SlurmJob) -> None:
    job.finish_when = lambda: len(job.started()) == 4
    assert job.on_hosts('ab', '0.0=kill:attempt-1.0', nodes=2, survive=False).run() == 0
    ports = {
        int(job.attempt(rank, attempt)['env']['MASTER_PORT'])
        for rank in range(2)
        for attempt in range(2)
    }
    assert len(ports) == 2 and job.running.store.port in ports


@pytest.mark.parametrize('forks', [True, False])
def test_spare_host_takes_the_seat_of_a_lost_host(job: SlurmJob, forks: bool) -> None:
    there: list[int] = []
    if not forks:
        starts_a_thread(job)
    spares = 1 if forks else 2

    def lose_when_ready(event: Event) -> None:
        ready = len(job.spares()) == spares and job.started(2) and job.started(3)
        if ready and 'b' not in job.dead:
            job.lose('b')
        if isinstance(event, WorkerLaunched) and (event.rank, event.restarts) == (3, 1):
            there.append(len(psutil.Process(job.steps['c'][0]._process.pid).children()))

    job.on_event = lose_when_ready
    job.finish_when = lambda: len(job.started(2)) == len(job.started(3)) == 2
    assert job.on_hosts('abc', nodes=2, workers_per_node=2).run() == 0
    assert job.seated() == [('a', 0), ('b', 1), ('c', 1)]
    assert job.lost() == [('b', 1)]
    for rank in (2, 3):
        assert ended(job)[rank] == [-9, 0]
        assert dies(job.started(rank)[0].pid)
        assert job.started(rank)[1].was_spare
        assert job.attempt(rank, 1)['env']['MOEVEMENT_NODE'] == 'c'
    if not forks:
        assert {event.pid for event in job.spares()} == {job.started(r)[1].pid for r in (2, 3)}
    assert ended(job)[0] == ended(job)[1] == [0]
    # The workers, and the spare that forked them, if it can: no other spares are started.
    assert there == [3 if forks else 2]


def test_worker_that_dies_on_a_healthy_host_is_forked_there(job: SlurmJob) -> None:
    job.on(SpareReady, lambda event: job.touch('ready'), nth=2)  # one on each host
    job.finish_when = lambda: len(job.started(1)) == 3
    flags = ('1.0=kill:ready', '1.1=kill')
    assert job.on_hosts('ab', *flags, nodes=2, spares=1).run() == 0
    assert [event.was_spare for event in job.started(1)] == [True, True, True]
    assert {job.attempt(1, n)['env']['MOEVEMENT_NODE'] for n in range(3)} == {'b'}
    assert len(job.spares()) == 2


@pytest.mark.parametrize('comes', ['before', 'after'])
def test_spare_host_reserves_the_files_of_the_largest_seat(
    job: SlurmJob, comes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, '_FIRST_PAUSE_S', 0.1)
    kept = [[1], [2, 3], [7], [1]]  # pages of the files of each rank; two ranks per seat
    found: list[list[int]] = []
    with tmpfs_directory() as root:
        spare = ReservedPages(NodeStore(root, 'run', 'c'))

        def finish_when_reserved() -> None:
            until = time.monotonic() + 120
            while spare.nbytes() < 8 * mmap.PAGESIZE and time.monotonic() < until:
                time.sleep(0.01)
            found.append(sorted(spare._sizes().values()))
            job.finish()

        if comes == 'after':
            job.on(NodeReady, lambda event: job.steps['c'][0]._process.kill(), host='c')
        job.finish_when = lambda: False
        running = job.on_hosts('abc', nodes=2, workers_per_node=2)
        job.mailbox.set('memory', str(root / 'run'))
        for rank, pages in enumerate(kept):
            sizes = [number * mmap.PAGESIZE for number in pages]
            files = reservation.encode([reservation._KeptFile('0', size, size) for size in sizes])
            job.mailbox.set(f'files/{rank}', files)
        job.mailbox.add('files', 4)
        waiting = threading.Thread(target=finish_when_reserved)
        waiting.start()
        assert running.run() == 0
        waiting.join()
        assert found == [[mmap.PAGESIZE, 7 * mmap.PAGESIZE]]
        assert not list(root.iterdir())  # nothing is left after the job


def test_job_without_a_spare_host_ends(job: SlurmJob) -> None:
    job.on(WorkerLaunched, lambda event: job.lose('b'), rank=1)
    job.finish_when = lambda: False
    assert job.on_hosts('ab', nodes=2).run() == EXIT_WHOLE_JOB
    assert 'node 1 of the job has no host, and no spare node is left (b: ' in failure(job)
    assert len(job.steps['b']) == 2  # the host was tried again
    assert dies(job.started(0)[0].pid)


def test_dead_agent_is_restarted_on_its_host(job: SlurmJob) -> None:
    def kill_agent(event: Event) -> None:
        job.lose('b')
        job.dead.clear()

    job.on(WorkerLaunched, kill_agent, rank=1, restarts=0)
    job.finish_when = lambda: len(job.started(1)) == 2
    assert job.on_hosts('ab', nodes=2).run() == 0
    assert job.seated() == [('a', 0), ('b', 1), ('b', 1)]
    assert job.attempt(1, 1)['env']['MOEVEMENT_NODE'] == 'b'


def test_workers_move_if_the_agent_dies_before_starting_them(job: SlurmJob) -> None:
    """Workers whose order was lost used to have no host and to wait for five minutes."""

    def lose_when_seated(event: Event) -> None:
        job.lose('a')
        assert job.steps['a'][-1]._process.wait(60.0)

    job.on(NodeSeated, lose_when_seated, host='a')
    job.finish_when = lambda: {event.rank for event in job.started()} == {0, 1, 2, 3}
    assert job.on_hosts('ab', nodes=1, workers_per_node=4).run() == 0
    assert job.seated() == [('a', 0), ('b', 0)]
    assert job.lost() == [('a', 0)]


def test_silent_host_counts_as_lost(job: SlurmJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, 'SILENT_S', 4.0)

    def stop_agent(event: Event) -> None:
        job.steps['b'][-1]._process.send_signal(signal.SIGSTOP)

    job.on(WorkerLaunched, stop_agent, rank=1, restarts=0)
    job.finish_when = lambda: len(job.started(1)) == 2
    assert job.on_hosts('abc', nodes=2).run() == 0
    assert job.lost()[0] == ('b', 1)
    assert job.seated()[-1] == ('c', 1)
    assert dies(job.started(1)[0].pid)


def test_host_with_an_unkillable_worker_counts_as_lost(
    job: SlurmJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, 'TO_DIE_S', 1.0)

    def kill(event: WorkerLaunched) -> None:
        hold(event.pid)
        os.kill(event.pid, signal.SIGKILL)  # as its watchdog does

    job.on(WorkerLaunched, kill, rank=1, restarts=0)
    job.finish_when = lambda: len(job.started(1)) == 2
    with unkillable() as hold:
        assert job.on_hosts('abc', nodes=2).run() == 0
    assert job.lost() == [('b', 1)]
    assert job.seated()[-1] == ('c', 1)
    assert len(job.steps['b']) == 1


def test_host_whose_agent_starts_no_worker_counts_as_lost(
    job: SlurmJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent sends heartbeats but hangs, for example on a file system."""
    monkeypatch.setattr(remote, '_TO_START_S', 1.0)
    log = tmp_path / 'rank1.log'
    os.mkfifo(log)  # open() blocks until there is a reader

    def repair(event: NodeLost) -> None:
        log.unlink()

    job.on(NodeLost, repair)
    job.finish_when = lambda: len(job.started(0)) == len(job.started(1)) == 1
    assert job.on_hosts('abc', nodes=2, log_dir=tmp_path).run() == 0
    assert job.lost() == [('b', 1)]
    assert job.seated()[-1] == ('c', 1)


def test_unreachable_host_is_replaced_by_a_spare_at_the_start(job: SlurmJob) -> None:
    job.dead.add('a')
    job.finish_when = lambda: len(job.started()) == 2
    assert job.on_hosts('abc', nodes=2).run() == 0
    assert job.seated() == [('b', 0), ('c', 1)]


def test_agent_leaves_signals_to_the_supervisor(
    job: SlurmJob, capfd: pytest.CaptureFixture[str]
) -> None:
    """Slurm may signal all processes of a step."""

    def send_all(event: WorkerLaunched) -> None:
        for number in leaving.ASKING:
            job.steps['a'][-1]._process.send_signal(number)
        job.running.stop(138)

    job.finish_when = lambda: False
    job.on(WorkerLaunched, send_all)
    flags = '--exit-signal-handler', '--exit-signal', 'SIGUSR1'
    assert job.on_hosts('a', *flags, nodes=1).run() == 138
    assert (ended(job)[0], job.lost()) == ([-signal.SIGUSR1], [])
    assert 'SIGINT has no effect on a step; to end the job, signal' in capfd.readouterr().err


def test_no_process_outlives_the_supervisor(job: SlurmJob, tmp_path: Path) -> None:
    job.finish_when = lambda: False
    flags = ('0.0=deaf', '0.0=print:deaf', '1.0=child')
    log = tmp_path / 'logs' / 'rank0.log'
    supervisor = job.on_hosts('ab', *flags, nodes=2, grace_s=0.3, log_dir=log.parent)

    def stop() -> None:
        while not (
            log.exists() and 'deaf' in log.read_text() and (tmp_path / 'attempt-1.0').exists()
        ):
            time.sleep(0.01)
        supervisor.stop(143)

    threading.Thread(target=stop, daemon=True).start()
    assert supervisor.run() == 143
    assert ended(job)[0] == [-9]
    for host in 'ab':
        assert job.steps[host][0].ended() is not None
    assert dies(job.attempt(1)['child'])


@pytest.mark.parametrize('logged', [True, False])
def test_staged_kill_of_a_worker_and_of_a_node(job: SlurmJob, logged: bool, tmp_path: Path) -> None:
    """A killed node loses its agent, its workers, and its windows of this run."""
    memory = tmp_path / 'memory'
    for place in ('run/a', 'run/b', 'run/c', 'other/b'):
        (memory / place / '0').mkdir(parents=True)
    kept: list[list[str]] = []

    def look(event: NodeLost) -> None:
        kept.append(sorted(str(path.relative_to(memory)) for path in memory.glob('*/*')))

    job.on(NodeLost, look)
    job.finish_when = lambda: len(job.started(1)) == 3
    faults = (StagedFault(StagedAction.KILL, 1, 2), StagedFault(StagedAction.KILL_NODE, 1, 3))
    flags = (
        f'--sparse-ckpt-dir={memory}', '--sparse-ckpt-run-id', 'run',
        '1.0=print:iteration 2/', '1.1=print:iteration 3/',
    )  # fmt: skip
    log_dir = tmp_path / 'logs' if logged else None
    supervisor = job.on_hosts('abc', *flags, nodes=2, log_dir=log_dir, faults=faults)
    assert supervisor.run() == 0
    assert ended(job)[1] == [-9, -9, 0]
    assert job.lost() == [('b', 1)]
    assert kept == [['other/b', 'run/a', 'run/c']]
    assert dies(job.started(1)[1].pid)
    assert job.attempt(1, 2)['env']['MOEVEMENT_NODE'] == 'c'


def test_last_output_of_a_worker_may_have_any_length(job: SlurmJob) -> None:
    """An endless binary line, sent unchanged to the launcher, once cost the whole host."""
    job.finish_when = lambda: len(job.started(0)) == 2
    flags = ('0.0=print-bytes:3000000', '0.0=kill')
    assert job.on_hosts('a', *flags, nodes=1, workers_per_node=2).run() == 0
    assert job.lost() == []
    assert ended(job)[1] == [0]


def test_worker_that_cannot_be_started_does_not_lose_its_host(
    job: SlurmJob, tmp_path: Path
) -> None:
    """If the failure persists, the job ends with the reason."""
    log = tmp_path / 'logs' / 'rank1.log'
    log.mkdir(parents=True)
    job.finish_when = lambda: False
    assert job.on_hosts('a', nodes=1, workers_per_node=2, log_dir=log.parent).run() == 1
    assert 'it failed by itself 3 times' in failure(job)
    assert 'cannot be started on a: ' in failure(job) and 'rank1.log' in failure(job)
    assert job.lost() == []
    assert ended(job)[0] == [-9]
