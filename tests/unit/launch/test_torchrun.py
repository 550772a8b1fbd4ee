# SPDX-License-Identifier: Apache-2.0
"""Restarts of workers by an agent of `moevement torchrun`."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from moevement_ext.config import ConfigurationError
from moevement_ext.launch.torchrun_agent import OutsideStore
from tests.unit.store.processes import WAIT_S, Server

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
