# SPDX-License-Identifier: Apache-2.0
"""A worker is caught in the phase of a recovery that is aimed at."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from moevement_ext.events import RecoveryPhase
from tools.chaos.aiming import Aim
from tools.chaos.landing import Phase, landed
from tools.lab.evidence import kind_of
from tools.lab.following import read_events

pytestmark = pytest.mark.timed

RECOVERING = """
import sys, time
from moevement_ext.events import EventLog, Recovered, RecoveryPhase

def work(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass

events = EventLog(sys.argv[1], 0)
sys.stdin.readline()
for phase in sys.argv[2].split(','):
    events.emit(RecoveryPhase(phase=phase))
    work(0.05)
fields = {'replayed': 0, 'verified': 0, 'verified_at': -1, 'differing': [], 'seconds': {}}
events.emit(Recovered(scope=sys.argv[3], **fields, iterations=0))
time.sleep(60)
"""


class TestAim:
    @pytest.fixture
    def worker(self, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
        """Starts a process that writes events of a recovery once it is told to."""
        started: list[subprocess.Popen] = []

        def start(phases: str, scope: str = 'localized') -> subprocess.Popen:
            command = [sys.executable, '-c', RECOVERING, str(tmp_path), phases, scope]
            worker = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
            started.append(worker)
            while not (tmp_path / 'rank0.jsonl').exists():
                assert worker.poll() is None, 'it ended before it wrote anything'
                time.sleep(0.01)
            return worker

        yield start
        for worker in started:
            worker.kill()
            worker.wait()

    def catch(self, folder: Path, phase: Phase, worker: subprocess.Popen) -> RecoveryPhase | None:
        aim = Aim(folder, phase, suitable=lambda rank: rank == 0)
        print(file=worker.stdin, flush=True)
        return aim.catch(lambda: worker.poll() is None)

    @pytest.mark.parametrize('aimed', [Phase.MEET, Phase.FETCH, Phase.POST_STEP])
    def test_caught_worker_is_stopped_in_the_phase(
        self, aimed: Phase, tmp_path: Path, worker: Callable[..., subprocess.Popen]
    ) -> None:
        process = worker('detect,meet,respawn,regroup,fetch,regroup,post-step,first-iteration,over')
        caught = self.catch(tmp_path, aimed, process)
        assert caught is not None and caught.pid == process.pid
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        assert landed(read_events(tmp_path), None, time.time(), process.pid) is aimed

    @pytest.mark.parametrize(
        ('phases', 'scope'), [('detect,meet,over', 'localized'), ('detect', 'whole job')]
    )
    def test_missing_phase_catches_nothing(
        self, phases: str, scope: str, tmp_path: Path, worker: Callable[..., subprocess.Popen]
    ) -> None:
        assert self.catch(tmp_path, Phase.CONVERT, worker(phases, scope)) is None

    def test_events_of_an_earlier_recovery_are_ignored(
        self, tmp_path: Path, worker: Callable[..., subprocess.Popen]
    ) -> None:
        process = worker('first-iteration,over,detect,meet,first-iteration,over')
        caught = self.catch(tmp_path, Phase.FIRST_ITERATION, process)
        phases = [event.phase for event in kind_of(read_events(tmp_path), RecoveryPhase)]
        assert caught is not None and phases.count('first-iteration') == 2
