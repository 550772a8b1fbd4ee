# SPDX-License-Identifier: Apache-2.0
"""The coordinator's process is killed, stopped, and left alone."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from moevement_ext.coordinator import coordinator_client
from moevement_ext.coordinator.coordinator_client import CoordinatorClient
from moevement_ext.coordinator.keeper import Keeper
from moevement_ext.coordinator.statements import Hello, JobStart, Promises, Settled
from moevement_ext.memory.window.name import NOTHING_AGREED, Agreed, WindowName
from tests.unit.replicate.peers import wait_for

pytestmark = pytest.mark.timed

SECRET = b's' * 32
ALONE = """
import time
import socket
from moevement_ext.coordinator.keeper import Keeper
keeper = Keeper('127.0.0.1', b's' * 32)
client = socket.create_connection(keeper.address)
while not keeper._pid:
    time.sleep(0.01)
print(keeper._pid, keeper.address[1], flush=True)
time.sleep(1000)
"""


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    keeper = Keeper('127.0.0.1', SECRET)
    yield keeper
    keeper.close()


class Alone:
    """The only rank of a job, and what it was told of its windows."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.told: list[Agreed] = []
        self.client = CoordinatorClient(address, SECRET, Hello(0, 7, JobStart(0, 1, '')), self.hear)
        self.client.enter((1, 7), address)

    def hear(self, news: object) -> None:
        assert isinstance(news, Settled)
        self.told.append(news.agreed)

    def promises(self, start: int) -> None:
        def more(old: Promises) -> Promises:
            return old.with_window(WindowName(start, 'a'), NOTHING_AGREED)

        self.client.promise((1, 7), 'memory', more)

    def hears(self, start: int) -> None:
        wait_for(lambda: self.told and self.told[-1].is_persisted(start))


def pid_of(keeper: Keeper) -> int:
    return wait_for(lambda: keeper._pid)


@pytest.mark.parametrize('fault', [signal.SIGKILL, signal.SIGSTOP])
def test_another_process_takes_the_place_of_a_lost_one(
    fault: signal.Signals, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Alone(keeper.address)
    rank.promises(0)
    rank.hears(0)
    first = pid_of(keeper)
    os.kill(first, fault)
    rank.promises(4)
    rank.hears(4)
    assert pid_of(keeper) != first
    assert f'the coordinator (pid {first}) ended with status -9; another one' in caplog.text
    rank.client.close()


def test_an_unreachable_one_is_named_once_with_a_remedy(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_client, '_TOLD_S', 0.1)
    rank = Alone(('127.0.0.1', 1))
    wait_for(lambda: 'the coordinator at 127.0.0.1:1 has been out of reach' in caplog.text)
    wait_for(lambda: rank.client._loop.time() > 0)
    rank.client.close()
    assert caplog.text.count('let all nodes reach that port') == 1


@pytest.mark.parametrize('stopped', [False, True])
def test_none_outlives_its_keeper(stopped: bool) -> None:
    """Not even a stopped one, which could not notice."""
    parent = subprocess.Popen([sys.executable, '-c', ALONE], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        pid, port = map(int, parent.stdout.readline().split())
        process, rank = psutil.Process(pid), Alone(('127.0.0.1', port))
        rank.promises(0)
        rank.hears(0)
        rank.client.close()
        if stopped:
            parent.send_signal(signal.SIGSTOP)  # otherwise it would replace it
            process.suspend()
        parent.kill()
    wait_for(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def test_forks_of_other_threads_hold_up_no_coordinator() -> None:
    """A data loader that begins at this moment inherits what the new process waits for."""
    forks: list[int] = []
    over = threading.Event()

    def fork_again_and_again() -> None:
        while not over.wait(0.001) and len(forks) < 300:
            forks.append(pid := os.fork())
            if not pid:
                signal.pause()

    thread = threading.Thread(target=fork_again_and_again)
    thread.start()
    try:
        keeper = Keeper('127.0.0.1', SECRET)
        alone = Alone(keeper.address)
        alone.promises(4)
        alone.hears(4)
        alone.client.close()
        keeper.close()
    finally:
        over.set()
        thread.join()
        for pid in forks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
