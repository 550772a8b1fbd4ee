# SPDX-License-Identifier: Apache-2.0
"""Restarts of workers by an agent of `moevement torchrun`, also of forks of one process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from moevement_ext.config import ConfigurationError
from moevement_ext.launch.torchrun_agent import OutsideStore
from moevement_ext.launch.torchrun_workers import _Handler, _Source, a_death
from moevement_ext.membership import counters
from moevement_ext.membership.mailbox import write_survivors
from moevement_ext.membership.rendezvous import how_broken, is_over
from tests.support.readable import readable
from tests.unit.launch.conftest import unkillable
from tests.unit.store.processes import WAIT_S, Server, until

pytestmark = pytest.mark.timed

ENDS = """
import os, sys, time
attempt, rank = os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['RANK']
with open(sys.argv[1], 'a') as starts:
    starts.write(f'{rank}:{attempt} ')
if rank == '1':
    while f'0:{attempt}' not in open(sys.argv[1]).read():
        time.sleep(0.1)
    sys.exit(int(sys.argv[2].split(',')[int(attempt)]))
time.sleep(0 if attempt == '2' else 1000)
"""
"""Rank 1 exits with the status of each attempt; rank 0 sleeps except in the third attempt."""


@pytest.fixture
def store() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.mark.parametrize(
    ('statuses', 'status', 'attempts'),
    [('2,1,0', 2, 1), ('1,77,0', 77, 2), pytest.param('1,2,0', 0, 3, marks=pytest.mark.thorough)],
    ids=['from the start', 'other bits', 'a worker that was started again'],
)
def test_user_error_or_other_bits_end_the_agent_without_a_restart(
    statuses: str, status: int, attempts: int, store: Server, tmp_path: Path
) -> None:
    program, starts = tmp_path / 'program.py', tmp_path / 'starts'
    program.write_text(ENDS)
    command = [sys.executable, '-m', 'moevement_ext.launch.torchrun', '--nproc-per-node', '2']
    command += ['--max-restarts', '2', str(program), str(starts), statuses]
    command += ['--sparse-ckpt-store', f'127.0.0.1:{store.port}']
    ended = subprocess.run(command, capture_output=True, text=True, timeout=5 * WAIT_S, check=False)
    assert ended.returncode == status, ended.stderr
    begun = starts.read_text().split()
    assert sorted(begun) == [
        f'{rank}:{attempt}' for rank in range(2) for attempt in range(attempts)
    ]
    assert ('ended with exit status 2: it refuses' in ended.stderr) == (status == 2)
    assert 'Traceback' not in ended.stderr


MEETS = """
import os, socket, sys
from moevement_ext.config import COORDINATOR
from moevement_ext.coordinator.keeper import kept_by_launcher
from moevement_ext.replicate.connection import Connection
from moevement_ext.replicate.secret import given_in, introduce, of_coordinator
connection = Connection(socket.create_connection(kept_by_launcher('127.0.0.1'), 60))
assert introduce(connection, of_coordinator(given_in(os.environ))) is None
print('met at', os.environ[COORDINATOR], flush=True)
sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')
"""


@pytest.mark.parametrize('given', ['', pytest.param('s' * 32, marks=pytest.mark.thorough)])
def test_coordinator_of_the_agent_outlives_the_workers(given: str, tmp_path: Path) -> None:
    program = tmp_path / 'program.py'
    program.write_text(MEETS)
    command = [sys.executable, '-m', 'moevement_ext.launch.torchrun', '--standalone']
    command += ['--max-restarts', '1', str(program)]
    environment = {**os.environ, 'MOEVEMENT_SECRET': given}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=5 * WAIT_S, check=False, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    met = [line for line in ended.stdout.splitlines() if 'met at' in line]
    assert len(met) == 2 and len(set(met)) == 1, 'by both processes of rank 0, at one address'


def test_two_agents_of_one_node_do_not_take_turns(store: Server) -> None:
    """The workers of each would fence out those of the other, each time they are started."""

    def agent(rank: int) -> OutsideStore:
        return OutsideStore('127.0.0.1', store.port, rank, 2, 'none', timedelta(seconds=WAIT_S))

    first, other, second = agent(1), agent(0), agent(1)
    for one in (first, other, second, other, second):
        assert one.next_rendezvous().world_size == 2
    with pytest.raises(ConfigurationError, match='--node-rank 1: another agent'):
        first.next_rendezvous()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, 'argv', ['of another job'])
        agent(1).next_rendezvous()
    second.next_rendezvous()
    store.connect().delete_key(f'agents/none/2/{second._key}')  # as in another store in its place
    second.next_rendezvous()
    with pytest.raises(ConfigurationError):
        first.next_rendezvous()


ASKED = """
import os, signal, sys, time
def note(number, frame):
    with open(sys.argv[1], 'a') as heard:
        heard.write(f'{signal.Signals(number).name} ')
    sys.exit(0)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, note)
print('listens', flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ('sent', 'expected'),
    [
        pytest.param(signal.SIGTERM, signal.SIGUSR1, marks=pytest.mark.thorough),
        pytest.param(signal.SIGUSR1, signal.SIGUSR1, marks=pytest.mark.thorough),
        (signal.SIGUSR2, signal.SIGTERM),
    ],
)
def test_agent_forwards_the_exit_signal_of_its_workers(
    sent: signal.Signals, expected: signal.Signals, store: Server, tmp_path: Path
) -> None:
    program, heard = tmp_path / 'program.py', tmp_path / 'heard'
    program.write_text(ASKED)
    command = [sys.executable, '-m', 'moevement_ext.launch.torchrun', str(program), str(heard)]
    command += ['--sparse-ckpt-store', f'127.0.0.1:{store.port}']
    command += ['--exit-signal-handler', '--exit-signal', expected.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == 'listens\n'
        agent.send_signal(sent)
        agent.wait(WAIT_S)
    assert heard.read_text().split() == [expected.name]


PROGRAM = """
import os, signal, sys, threading, time
import psutil

{declaration}
with open(sys.argv[1], 'a') as imports:
    imports.write('t' if 'torch' in sys.modules else '.')
{at_import}

def main():
    rank, attempt = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']
    print(f'out of {{rank}}')
    print(f'err of {{rank}}', file=sys.stderr)
    if attempt == '1':
        sys.exit(0)
    if rank == '0':
        open(sys.argv[1] + '-0', 'w').close()
    else:
        while not os.path.exists(sys.argv[1] + '-0'):  # the agent ends rank 0 at this death
            time.sleep(0.01)
        if {kills_template}:
            started = psutil.Process().parent().children()
            min(started, key=psutil.Process.create_time).kill()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)

if __name__ == '__main__':
    main()
{at_end}
"""
DECLARED = 'MOEVEMENT_SPARES = True'
THREAD = 'threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()'
NEEDS_RANK = "assert 'RANK' in os.environ"
TORCH = ['torch.distributed.run', '--logs-specs', 'moevement']
OURS = ['moevement_ext.launch.torchrun']
TO_END_S = 120


def _thorough(*case: object) -> Any:
    """Of spares, which are started in the same way: `test_spare_pool.py`."""
    return pytest.param(OURS, *case, marks=pytest.mark.thorough)


@pytest.mark.parametrize(
    ('launcher', 'program', 'imported', 'why'),
    [
        (TORCH, {}, '.', None),
        (OURS, {}, 't', None),
        (OURS, {'kills_template': True}, 't.', None),
        (OURS, {'at_import': THREAD}, 't...', 'starts threads or uses a GPU'),
        _thorough({'declaration': ''}, '....', 'does not declare'),
        _thorough({'at_end': 'main'}, '....', 'as the last statement'),
        _thorough({'at_import': NEEDS_RANK}, 't....', 'in advance fails'),
    ],
    ids=[
        *('torchrun', 'ours', 'template killed', 'not to be forked', 'not declared'),
        *('no guard', 'import fails'),
    ],
)
def test_one_import_serves_all_workers_of_an_agent(
    launcher: list[str],
    program: dict[str, object],
    imported: str,
    why: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first attempt of two workers, and the second, which follows a SIGKILL.

    Each import writes a letter: t where it is in a fork of the agent, which has imported torch.
    """
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)  # torch would start a thread
    path, imports, logs = tmp_path / 'program.py', tmp_path / 'imports', tmp_path / 'logs'
    given = dict.fromkeys(('at_import', 'at_end'), '') | {'kills_template': False}
    given |= {'declaration': DECLARED} | program
    path.write_text(PROGRAM.format(**given))
    command = [sys.executable, '-m', *launcher, '--standalone', '--nproc-per-node', '2']
    command += ['--max-restarts', '1', '--redirects', '3', '--log-dir', str(logs)]
    command += [str(path), str(imports)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TO_END_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert 'exitcode: -9' in ended.stderr
    assert imports.read_text() == imported
    for stream in ('out', 'err'):
        written = sorted(file.read_text() for file in logs.rglob(f'attempt_*/*/std{stream}.log'))
        assert written == [f'{stream} of {rank}\n' for rank in (0, 0, 1, 1)]
    assert ended.stderr.count('starts as a new interpreter: ') == (why is not None)
    assert why is None or why in ended.stderr


def test_program_named_as_a_module_starts_fresh(capfd: pytest.CaptureFixture[str]) -> None:
    with open(os.devnull, 'w') as nowhere:
        command = [sys.executable, '-u', '-m', 'program', 'flag']
        assert _Source().start(command, {}, nowhere, nowhere) is None
    assert 'as a new interpreter: name its file, not its module' in capfd.readouterr().err


HOLDS = """
import os, pathlib, signal, sys, threading, time

MOEVEMENT_SPARES = True

def main():
    from moevement_ext.system import death_notice
    death_notice.hold()
    if not sys.argv[1:]:
        os.kill(os.getpid(), signal.SIGKILL)
    thread = threading.Thread(target=time.sleep, args=(600,), daemon=True)
    thread.start()
    new = pathlib.Path(sys.argv[1] + '.new')
    new.write_text(str(thread.native_id))
    new.rename(sys.argv[1])
    time.sleep(600)

if __name__ == '__main__':
    main()
"""


def test_agent_does_not_wait_to_look_at_a_dead_fork(tmp_path: Path) -> None:
    program = tmp_path / 'program.py'
    program.write_text(HOLDS)
    command = [sys.executable, '-m', *OURS, '--standalone', '--nproc-per-node', '2']
    command += ['--monitor-interval', '1000', str(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TO_END_S, check=False)
    assert 'exitcode: -9' in ended.stderr


def forked(folder: Path, store: TCPStore, *flags: str) -> Any:
    """Rank 1 of a job that meets in this store, as the agent's handle of its process."""
    program = folder / 'program.py'
    program.write_text(HOLDS)
    address = {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(store.port)}
    return _Handler(
        _Source(), entrypoint=sys.executable, args=('-u', str(program), *flags),
        env={'RANK': '1', 'TORCHELASTIC_USE_AGENT_STORE': 'True', **address},
        stdout=os.devnull, stderr=os.devnull, local_rank_id=0, numa_options=None,
    ).proc  # fmt: skip


@pytest.mark.parametrize('survivors', [True, False])
def test_death_of_a_fork_is_known_before_its_memory_is_freed(
    survivors: bool, tmp_path: Path
) -> None:
    """A thread that stops in its exit keeps the memory, as the kernel does for seconds."""
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    counters.sign(store, 'here/0', 1, 2)  # the worker took part in this round
    if survivors:
        write_survivors(store)
    thread = tmp_path / 'thread'
    worker = forked(tmp_path, store, str(thread))
    until(thread.exists)
    death = os.pidfd_open(worker.pid)
    with unkillable() as hold:
        release = hold(int(thread.read_text()))
        assert worker.poll() is None
        a_death.clear()
        os.kill(worker.pid, signal.SIGKILL)
        assert a_death.wait(TO_END_S)
        assert worker.poll() == -signal.SIGKILL
        if survivors:
            until(lambda: is_over(store, 0))
            how = f'rank 1 (pid {worker.pid}) was killed by SIGKILL'
            assert how_broken(store, 0).reason == how
        else:
            time.sleep(1.0)
            assert not is_over(store, 0)
        assert not readable(death, 0.0)
        release()
    assert worker.wait(0.0) == -signal.SIGKILL, 'it waits for the memory'
    os.close(death)
