# SPDX-License-Identifier: Apache-2.0
"""Small jobs: real processes of a scripted program under the real launcher."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from torch.distributed import Store

from moevement_ext.events import Event
from moevement_ext.launch.launch_config import LaunchConfig
from moevement_ext.launch.launcher_events import JobFailed, SpareReady, WorkerEnded, WorkerLaunched
from moevement_ext.launch.supervisor import Supervisor
from moevement_ext.membership.mailbox import of_launch, write_survivors

PROGRAM = '''
import json, multiprocessing, os, pathlib, signal, subprocess, sys, threading, time

MOEVEMENT_SPARES = True
imported = {'pid': os.getpid(), 'rank': os.environ.get('RANK'), 'path': sys.path[0]}
print('importing')
here = pathlib.Path(sys.argv[0]).parent


def main():
    """Acts on RANK.ATTEMPT=ACTION among the flags, then waits for the file `finish`."""
    attempt = f"{os.environ['RANK']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    left = subprocess.Popen(['sleep', '60']).pid if f'{attempt}=child' in sys.argv else None
    seen = {'argv': sys.argv, 'env': dict(os.environ), 'imported': imported, 'child': left}
    (here / f'new-{attempt}').write_text(json.dumps(seen))
    (here / f'new-{attempt}').rename(here / f'attempt-{attempt}')
    for flag in sys.argv[1:]:
        place, _, action = flag.partition('=')
        if place == attempt:
            act(*action.partition(':')[::2])
    wait_for('finish')


def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.002)


def act(action, value):
    if action == 'kill':
        if value:
            wait_for(value)
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == 'exit':
        code, _, name = value.partition(':')
        if name:
            wait_for(name)
        sys.exit(int(code))
    elif action == 'print':
        print(value)
    elif action == 'print-bytes':
        sys.stdout.buffer.write(b'\\xff' * int(value))
        sys.stdout.flush()
    elif action == 'spawn':
        multiprocessing.get_context('spawn').Process(target=print, args=(value,)).start()
    elif action == 'stop':
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == 'notice':
        from moevement_ext.system import death_notice
        death_notice.hold()
        thread = threading.Thread(target=time.sleep, args=(600,), daemon=True)
        thread.start()
        (here / 'new').write_text(str(thread.native_id))
        (here / 'new').rename(here / 'thread')
    elif action == 'deaf':
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


if __name__ == '__main__':
    main()
'''


HOLDER = """
import ctypes, sys, time

ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
seize, trace_exit = 0x4206, 0x40
print(ptrace(seize, int(sys.argv[1]), None, trace_exit), flush=True)
time.sleep(600)
"""


@contextmanager
def unkillable() -> Iterator[Callable[[int], Callable[[], None]]]:
    """Make a process, or a thread, immune to SIGKILL within the context."""
    with ExitStack() as stack:

        def hold(pid: int) -> Callable[[], None]:
            """Trace the process and stop it during its exit; until the result is called."""
            command = [sys.executable, '-I', '-S', '-c', HOLDER, str(pid)]
            holder = subprocess.Popen(command, stdout=subprocess.PIPE)
            stack.callback(holder.communicate)
            stack.callback(holder.kill)
            assert holder.stdout is not None
            assert holder.stdout.readline() == b'0\n'
            return holder.kill

        yield hold


class Job:
    """One job; `finish_when` decides after each event whether the workers may end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / 'program.py'
        self.program.write_text(PROGRAM)
        self.events: list[Event] = []
        self.on_event: Callable[[Event], object] = lambda event: None
        self.finish_when: Callable[[], bool] = lambda: bool(self.started())

    def supervisor(self, *flags: str, survive: bool = True, **settings: Any) -> Supervisor:
        """Supervisor; with `survive`, the program has reported that its workers survive."""
        config = LaunchConfig(str(self.program), flags, **settings)
        self.running = Supervisor(config, self._note)
        if survive:
            write_survivors(self.mailbox)
        return self.running

    @property
    def mailbox(self) -> Store:
        """The keys by which the program reports to its launcher."""
        return of_launch(self.running.store, self.running.config.launch)

    def run(self, *flags: str, **settings: Any) -> int:
        return self.supervisor(*flags, **settings).run()

    def process(self, rank: int) -> int:
        """Number of the present process of a rank."""
        return self.running.workers[rank].process

    def touch(self, name: str) -> None:
        """Let workers go on that wait for this file."""
        (self.folder / name).touch()

    def finish(self) -> None:
        self.touch('finish')

    def started(self, rank: int | None = None) -> list[WorkerLaunched]:
        return [event for event in self.seen(WorkerLaunched) if rank in (None, event.rank)]

    def spares(self) -> list[SpareReady]:
        return self.seen(SpareReady)

    def seen[Kind: Event](self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.events if isinstance(event, kind)]

    def on[Kind: Event](
        self,
        kind: type[Kind],
        call: Callable[[Kind], object],
        nth: int | None = None,
        **fields: object,
    ) -> None:
        """Call this, too, with each event of that kind with these fields; `nth`: of the kind."""
        others = self.on_event

        def note(event: Event) -> None:
            others(event)
            if isinstance(event, kind) and nth in (None, len(self.seen(kind))):
                if fields.items() <= structs.asdict(event).items():
                    call(event)

        self.on_event = note

    def attempt(self, rank: int, restarts: int = 0) -> dict:
        return json.loads((self.folder / f'attempt-{rank}.{restarts}').read_text())

    def _note(self, event: Event) -> None:
        print(event, file=sys.stderr)
        self.events.append(event)
        self.on_event(event)
        if self.finish_when():
            self.finish()


def failure(job: Job) -> str:
    (event,) = job.seen(JobFailed)
    return event.reason


def ended(job: Job) -> dict[int, list[int]]:
    """Exit codes of each rank's attempts."""
    codes: dict[int, list[int]] = {}
    for event in job.seen(WorkerEnded):
        codes.setdefault(event.rank, []).append(event.code)
    return codes


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job of the class `JOB` of the test module, if defined."""
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')  # the workers use no GPU
    return getattr(request.module, 'JOB', Job)(tmp_path)


def starts_a_thread(job: Job) -> None:
    """Make the program start a thread on import, so that it cannot be forked."""
    job.program.write_text(
        'import threading\n'
        'threading.Thread(target=threading.Event().wait, daemon=True).start()\n'
        + job.program.read_text()
    )
