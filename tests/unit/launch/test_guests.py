# SPDX-License-Identifier: Apache-2.0
"""A host is lost and no spare is left: guests, fewer hosts, or a wait, in jobs of Slurm.

On its fictitious hosts; and what a host answers.
"""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moevement_ext.config import ConfigurationError
from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.launch import messages, node, supervisor
from moevement_ext.launch.child import FdLoop
from moevement_ext.launch.launch_config import (
    GUESTS,
    LAYOUT,
    WAIT,
    LaunchConfig,
    StagedAction,
    StagedFault,
)
from moevement_ext.launch.launcher_events import (
    AllStartAgain,
    GuestsSeated,
    NodeReady,
    NodeSeated,
    WorkerEnded,
    WorkerLaunched,
)
from moevement_ext.launch.machine import Machine
from moevement_ext.membership.mailbox import read_cause
from moevement_ext.memory import reservation
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.name import WindowName, committed_name
from tests.distributed.conftest import mounted_tmpfs
from tests.unit.launch.conftest import ended, failure
from tests.unit.launch.on_hosts import SlurmJob
from tests.unit.memory.samples import tmpfs_directory

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]
JOB = SlurmJob
WINDOW = WindowName(3, 'history_plan')


@pytest.fixture(autouse=True)
def hosts_are_tried_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, '_FIRST_PAUSE_S', 1.0)


@pytest.fixture
def memory() -> Iterator[Path]:
    with tmpfs_directory() as root:
        yield root


def keep_windows(memory: Path, host: str, holder: int, *owners: int) -> None:
    """Put committed windows of these owners into the memory of a host."""
    store = NodeStore(memory, 'run', host)
    for owner in owners:
        path = store.owner_path(holder, owner)
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        (path / committed_name(WINDOW)).write_bytes(b'x')
    for path in (memory, *memory.rglob('*')):
        path.chmod(0o700)


def report_files(job: SlurmJob, memory: Path, ranks: int) -> None:
    """As workers do: each keeps its own windows and those of the rank before."""
    job.mailbox.set('memory', str(memory / 'run'))
    for rank in range(ranks):
        owners = rank, (rank - 1) % ranks
        files = [reservation._KeptFile(str(owner), 4096, 4096) for owner in owners]
        job.mailbox.set(f'files/{rank}', reservation.encode(files))
    job.mailbox.add('files', ranks)


def places(job: SlurmJob) -> list[tuple[int, str]]:
    found = [one for one in job.events if isinstance(one, NodeSeated | GuestsSeated)]
    return [(one.node, one.host) for one in found]


def test_ranks_of_a_lost_host_are_guests_and_move_home(job: SlurmJob, memory: Path) -> None:
    def lose_once_known(event: WorkerLaunched) -> None:
        if len(job.started()) == 4:
            job.lose('d')

    def let_it_return(event: WorkerLaunched) -> None:
        keep_windows(memory, 'b', 3, 3, 2)
        job.dead.clear()

    job.on(WorkerLaunched, lose_once_known)
    job.on(WorkerLaunched, let_it_return, rank=3, restarts=1)
    job.finish_when = lambda: len(job.started(3)) == 3
    running = job.on_hosts('abcd', nodes=4, when_no_spare=GUESTS)
    report_files(job, memory, 4)
    for rank, host in enumerate('abc'):
        keep_windows(memory, host, rank, rank, (rank - 1) % 4)
    assert running.run() == 0
    assert places(job)[4:] == [(3, 'b'), (3, 'd')]
    guest = job.attempt(3, 1)['env']
    assert (guest['MOEVEMENT_NODE'], guest['NCCL_HOSTID']) == ('b', 'guest-node3')
    assert (guest['RANK'], guest['LOCAL_RANK'], guest['GROUP_RANK']) == ('3', '0', '3')
    home = job.attempt(3, 2)['env']
    assert (home['MOEVEMENT_NODE'], home.get('NCCL_HOSTID')) == ('d', None)
    assert ended(job)[3] == [-9, -9, 0]
    assert [ended(job)[rank] for rank in (0, 1, 2)] == [[0], [0], [0]]
    assert not (memory / 'run' / 'b' / '3').exists()
    assert (memory / 'run' / 'b' / '1').exists()


def test_guests_stay_while_only_they_keep_a_window(job: SlurmJob, memory: Path) -> None:
    """They move as soon as another rank has it, too."""
    seen: list[str] = []

    def let_it_return(event: WorkerLaunched) -> None:
        keep_windows(memory, 'b', 3, 3, 2)
        job.dead.clear()

    def copy_it(event: messages.MemorySeen) -> None:
        seen.append(event.node)
        if len(seen) == 6:  # two looks at three hosts
            keep_windows(memory, 'a', 0, 3)

    job.on(WorkerLaunched, lambda event: len(job.started()) == 4 and job.lose('d'))
    job.on(WorkerLaunched, let_it_return, rank=3, restarts=1)
    job.finish_when = lambda: len(job.started(3)) == 3
    running = job.on_hosts('abcd', nodes=4, when_no_spare=GUESTS)
    hear = running._starter.guests.on_memory_seen

    def note(message: messages.MemorySeen) -> None:
        hear(message)
        if len(job.started(3)) == 2:
            copy_it(message)

    running._starter.guests.on_memory_seen = note
    report_files(job, memory, 4)
    for rank, host in enumerate('abc'):
        keep_windows(memory, host, rank, rank)
    assert running.run() == 0
    assert places(job)[4:] == [(3, 'b'), (3, 'd')]
    assert len(seen) >= 6


def test_host_of_guests_is_lost_too(job: SlurmJob) -> None:
    def strike(event: WorkerLaunched) -> None:
        if len(job.started()) == 4:
            job.lose('d')

    job.on(WorkerLaunched, strike)
    job.on(GuestsSeated, lambda event: job.lose('a'), nth=1)
    job.finish_when = lambda: len(job.started(0)) == 2 and bool(job.started(3)[1:])
    assert job.on_hosts('abcd', nodes=4, when_no_spare=GUESTS).run() == 0
    assert job.lost()[:3] == [('d', 3), ('a', 0), ('a', 3)]
    assert sorted(places(job)[5:]) == [(0, 'b'), (3, 'c')]


def test_host_without_room_takes_no_guests(job: SlurmJob, memory: Path) -> None:
    """The job ends as without guests, and the bytes are told."""
    job.on(WorkerLaunched, lambda event: len(job.started()) == 2 and job.lose('b'))
    job.finish_when = lambda: False
    flags = ('--sparse-ckpt-host-memory-gb', '0.001')
    running = job.on_hosts('ab', *flags, nodes=2, when_no_spare=GUESTS)
    report_files(job, memory, 2)
    assert running.run() == EXIT_WHOLE_JOB
    needed = 2 * (2 * 4096 + 1052672 + 65536)
    assert f'no guests: a: host memory {needed} bytes on this node' in failure(job)
    assert '--sparse-ckpt-host-memory-gb 0.001' in failure(job)


def test_device_without_room_takes_no_guests(job: SlurmJob) -> None:
    job.devices('a').set('GPU-0', memory=(3_000, 2_999))
    job.on(WorkerLaunched, lambda event: len(job.started()) == 2 and job.lose('b'))
    job.finish_when = lambda: False
    assert job.on_hosts('ab', nodes=2, when_no_spare=GUESTS).run() == EXIT_WHOLE_JOB
    assert 'a: GPU GPU-0 has 2999 bytes free, and its rank takes 3000' in failure(job)


def test_node_that_is_lost_for_good_stays_away(job: SlurmJob, memory: Path) -> None:
    faults = (
        StagedFault(StagedAction.LOSE_NODE, 1, 2),
        StagedFault(StagedAction.RETURN_NODE, 1, 3),
    )
    flags = (
        f'--sparse-ckpt-dir={memory}', '--sparse-ckpt-run-id', 'run',
        '2.0=print:iteration 2/',
    )  # fmt: skip
    job.on(WorkerLaunched, lambda event: job.running._stage_faults(3), rank=1, restarts=1)
    job.finish_when = lambda: len(job.started(1)) == 3
    running = job.on_hosts('abc', *flags, nodes=3, when_no_spare=GUESTS, faults=faults)
    report_files(job, memory, 3)
    for rank, host in enumerate('abc'):
        keep_windows(memory, host, rank, rank, (rank - 1) % 3)
    assert running.run() == 0
    assert [host for _, host in places(job)[3:]][-1] == 'b'
    assert len(job.steps['b']) == 2


def test_room_is_checked_to_the_byte(tmp_path: Path, job: SlurmJob) -> None:
    sent: list[messages.FromAgent] = []
    program = messages.program(LaunchConfig(str(job.program)), {})
    machine = Machine(program, {'MOEVEMENT_NODE': 'b'}, FdLoop(), sent.append, job._note)
    files, beside = 20 * 4096, 1052672 + 65536
    with mounted_tmpfs(tmp_path / 'small', str(files + beside)) as small:
        for nbytes in (files, files + 1):
            machine.obey(messages.LookAtMemory('b', str(small), 'run', {3: nbytes}, [], 1))
    fits, short = sent
    assert isinstance(fits, messages.MemorySeen) and isinstance(short, messages.MemorySeen)
    assert fits.trouble == ''
    assert f'needs {files + beside + 1} bytes more' in short.trouble
    machine.close()


ABC = [('a', 0), ('b', 1), ('c', 2)]
ELASTIC = '--sparse-ckpt-elastic', 'restart'


def sizes(job: SlurmJob) -> list[int | None]:
    return [event.nodes for event in job.seen(AllStartAgain)]


def lose_b(job: SlurmJob, of: int) -> None:
    """Lose the host b once so many workers have started."""
    job.on(WorkerLaunched, lambda event: len(job.started()) == of and job.lose('b'))


def test_job_waits_for_a_lost_host(job: SlurmJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, '_REPEAT_S', 0.5)
    causes = []

    def note(event: WorkerLaunched) -> None:
        causes.append(read_cause(job.mailbox, event.restarts))

    lose_b(job, 2)
    job.on(AllStartAgain, lambda event: job.dead.clear(), nth=3)
    job.on(WorkerLaunched, note)
    job.finish_when = lambda: len(job.started()) == 4
    assert job.on_hosts('ab', nodes=2, when_no_spare=WAIT).run() == 0
    assert sizes(job)[:3] == [0, 0, 0] and sizes(job)[-1] == 2
    assert 'the job waits for nodes, since node 1 of the job has no host' in str(
        job.seen(AllStartAgain)[0]
    )
    assert job.seated() == [('a', 0), ('b', 1), ('a', 0), ('b', 1)]
    assert [causes[-1].rank, causes[-1].how.endswith('was lost with host b')] == [1, True]
    assert ended(job) == {0: [0], 1: [-9, 0]}


@pytest.mark.parametrize('ends', [False, True])
def test_job_goes_on_with_fewer_hosts_and_grows_again(ends: bool, job: SlurmJob) -> None:
    """With the host that has returned, unless the job ends by itself at that moment."""
    at: list[float] = []

    def let_it_return(event: WorkerLaunched) -> None:
        report_files(job, memory, 2)
        job.dead.clear()

    def finish(event: WorkerEnded) -> None:
        for rank in range(2):
            job.mailbox.set(f'finished/{rank}', f'{job.process(rank)} 0')

    lose_b(job, 3)
    job.on(WorkerLaunched, let_it_return, rank=1, restarts=2)
    job.on(WorkerEnded, finish, code=-signal.SIGTERM)
    job.on(NodeReady, lambda event: at.append(time.monotonic()), nth=4)
    job.on(AllStartAgain, lambda event: at.append(time.monotonic()), nth=2)
    job.finish_when = lambda: len(job.started()) == 8
    with tmpfs_directory() as memory:
        running = job.on_hosts('abc', *ELASTIC, nodes=3, when_no_spare=LAYOUT, grow_after_s=1.0)
        report_files(job, memory, 3)
        if not ends:  # otherwise it has freed its windows
            keep_windows(memory, 'a', 0, 0)
        assert running.run() == 0
    assert sizes(job) == ([2] if ends else [2, 3])
    assert job.seated()[3:] == [('a', 0), ('c', 1), *([] if ends else ABC)]
    assert ended(job)[0] == ([-15] if ends else [-15, 0])
    env = job.attempt(1, 2)['env']
    assert (env['WORLD_SIZE'], env['MOEVEMENT_NODE'], env['GROUP_RANK']) == ('2', 'c', '1')
    ready, *again = at
    assert ends or again[-1] >= ready + 1.0


def test_job_has_the_number_of_hosts_that_its_program_names(job: SlurmJob) -> None:
    lose_b(job, 3)
    job.on(AllStartAgain, lambda event: job.dead.clear(), nth=2)
    job.finish_when = lambda: len(job.started()) == 9
    refusing = [
        f'{rank}.2={action}' for rank in range(2) for action in ('print:Start 1 ranks', 'exit:2')
    ]
    settings = {'nodes': 3, 'when_no_spare': LAYOUT, 'grow_after_s': 0.0}
    assert job.on_hosts('abc', *ELASTIC, *refusing, **settings).run() == 0
    assert sizes(job) == [2, 1, 3]


def test_layout_needs_a_program_that_reads_windows_of_others(job: SlurmJob) -> None:
    exact = *ELASTIC, '--sparse-ckpt-elastic-exact'
    for flags in ((), exact):
        with pytest.raises(ConfigurationError, match='--sparse-ckpt-elastic restart, without'):
            LaunchConfig('program.py', flags, nodes=2, when_no_spare=LAYOUT)
        with pytest.raises(ConfigurationError, match='--layout-after: needs --when-no-spare'):
            LaunchConfig('program.py', flags, 2, when_no_spare=GUESTS, layout_after_s=9.0)
    assert LaunchConfig('program.py', exact, nodes=2, when_no_spare=GUESTS).sizes == {2}
    assert LaunchConfig('program.py', ELASTIC, nodes=2, when_no_spare=GUESTS).sizes == {1, 2}
