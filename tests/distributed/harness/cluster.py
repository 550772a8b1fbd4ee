# SPDX-License-Identifier: Apache-2.0
"""Starts real training jobs for tests: real processes and real deaths, with one import.

A fork server imports torch, Megatron and `pretrain_gpt` once; each worker of a job is a fork of it,
so a job of four ranks starts in about a second instead of tens of seconds.
"""

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from moevement_ext.config_file import SITE
from moevement_ext.errors import EXIT_OTHER_BITS
from moevement_ext.events import Event, decode
from moevement_ext.membership.mailbox import PROCESS, read_finished
from moevement_ext.membership.rendezvous import announce_failure
from moevement_ext.replicate import secret
from moevement_ext.system.leaving import leave
from tests.distributed.harness import dense_saves, exact_memory
from tests.distributed.harness.ports import free_port
from tools.lab.evidence import kind_of

ROOT = Path(__file__).resolve().parents[3]
BACKEND = 'MOEVEMENT_TEST_BACKEND'
"""Variable with the backend of a worker's job: gloo, or `NCCL_LIKE`."""
NCCL_LIKE = 'nccl-like'
_EVENTS_SHOWN = 40
"""Number of events shown for a failed test."""

_CONTEXT = multiprocessing.get_context('forkserver')
_CONTEXT.set_forkserver_preload(['tests.distributed.harness.preload'])


def _worker(
    program: str, argv: list[str], env: dict[str, str], log: str, mutation: str | None
) -> None:
    """Body of one rank, in a fork of the fork server."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, 'w', buffering=1, closefd=False)
    sys.stderr = open(2, 'w', buffering=1, closefd=False)
    os.environ.update(env)
    os.environ[PROCESS] = str(os.getpid())  # here process ids are unique
    multiprocessing.set_start_method('fork', force=True)  # the default of a program
    sys.argv = [f'{program}.py', *argv]
    module = import_module(program)
    dense_saves.install()
    if exact_memory.wanted():
        exact_memory.install()
    if os.environ[BACKEND] == NCCL_LIKE:
        import_module('tests.distributed.harness.nccl_like').install()
    for one in mutation.split(',') if mutation else ():
        place, _, function = one.rpartition(':')
        getattr(import_module(f'tests.distributed.{place or "mutations.whole_job"}'), function)()
    module.main()
    leave(0)  # as a program's last line does; a fork of the fork server has none


@dataclass
class Cluster:
    """One training job that may be started several times, on emulated nodes.

    Attributes:
        flags: command line of the program.
        ranks: world size.
        nodes: number of emulated nodes; ranks are spread evenly over them.
        directory: for logs, events, digests.
        program: module whose `main` each rank runs.
        backend: of `torch.distributed`: 'gloo', or `NCCL_LIKE` (see `nccl_like`).
        gives_secret: passes a secret to the workers, as this project's launchers do; torchrun
            does not.
        exact_memory: the tmpfs of each node has exactly the planned size.
        settings: lines of a file of settings, for those without a flag.
    """

    flags: list[str]
    directory: Path
    ranks: int = 4
    nodes: int = 2
    program: str = 'pretrain_gpt'
    backend: str = 'gloo'
    gives_secret: bool = True
    exact_memory: bool = False
    settings: str = ''
    name: str = field(default_factory=lambda: f'test-{uuid.uuid4().hex[:12]}')
    attempts: int = 0

    def __post_init__(self) -> None:
        if self.exact_memory:
            for node in range(self.nodes):
                exact_memory.mount(self.node_memory(node))

    @property
    def memory(self) -> Path:
        """Host memory of the run, all nodes."""
        return Path('/dev/shm/moevement-tests') / self.name

    def node_memory(self, node: int) -> Path:
        return self.memory / f'node{node}'

    def site(self) -> dict[str, str]:
        """Environment of a site with a file of the present settings, beside the directory."""
        if not self.settings:
            return {}
        file = self.directory.with_suffix('.toml')
        if not file.exists() or file.read_text() != self.settings:  # a worker may be reading it
            file.write_text(self.settings)
        return {SITE: str(file)}

    def sparse_flags(self) -> list[str]:
        """Flags that put windows and events into this run's directories."""
        return [
            '--sparse-ckpt',
            '--sparse-ckpt-dir', str(self.memory.parent),
            '--sparse-ckpt-run-id', self.name,
            '--sparse-ckpt-events', str(self.directory / 'events'),
        ]  # fmt: skip

    def run(
        self,
        *,
        fail_at: str = '',
        mutation: str | None = None,
        timeout_s: float = 400.0,
        all_end: bool = False,
    ) -> list[int]:
        """Start all ranks; as soon as one dies, SIGKILL the others (the whole job is lost).

        Args:
            fail_at: `MOEVEMENT_FAIL_AT`, with this attempt's number where none is given.
            mutation: name of a function in `mutations.whole_job` that breaks the product, or
                `module:function` of another module here, called in each worker before `main`;
                several are separated by commas.
            all_end: all workers end by themselves; otherwise the remaining workers are killed when
                one has failed.

        Returns:
            Exit codes by rank.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        port = free_port()
        workers = []
        for rank in range(self.ranks):
            env = self._environment(rank, port, fail_at)
            arguments = (self.program, self.flags, env, str(self.log(rank)), mutation)
            workers.append(_CONTEXT.Process(target=_worker, args=arguments))
        for worker in workers:
            worker.start()
        try:
            self._supervise(workers, timeout_s, all_end)
        finally:
            _end(workers)
        self.attempts += 1
        return [worker.exitcode for worker in workers]

    def survive(
        self,
        *,
        fail_at: str = '',
        fault: Callable[[list, Callable[[int], Any]], None] | None = None,
        wipe: Collection[int] = (),
        mutation: str | None = None,
        announce: bool = True,
        timeout_s: float = 480.0,
    ) -> dict[int, int]:
        """Run to the end under a launcher that restarts only the workers that died.

        Like real launchers, it ends the job after `EXIT_OTHER_BITS`.

        Args:
            fail_at: `MOEVEMENT_FAIL_AT`.
            fault: called repeatedly with the workers and a function that starts the worker of a
                given rank, to kill or stop some.
            wipe: nodes whose memory is deleted when one of their workers dies.
            mutation: as for `run`, in all workers.
            announce: the launcher reports a death to the others; else they detect it themselves.

        Returns:
            Number of restarts of each rank that was restarted.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
        starts = dict.fromkeys(range(self.ranks), 0)
        started: list[multiprocessing.Process] = []

        def start(rank: int, **env: str) -> multiprocessing.Process:
            env = {
                **self._environment(rank, store.port, fail_at),
                'TORCHELASTIC_USE_AGENT_STORE': 'True',
                'TORCHELASTIC_RESTART_COUNT': str(starts[rank]),
                **env,
            }
            arguments = (self.program, self.flags, env, str(self.log(rank)), mutation)
            worker = _CONTEXT.Process(target=_worker, args=arguments)
            worker.start()
            started.append(worker)
            return worker

        workers = [start(rank) for rank in range(self.ranks)]
        deadline = time.monotonic() + timeout_s
        try:
            while any(worker.exitcode != 0 for worker in workers):
                if time.monotonic() > deadline:
                    raise TimeoutError(f'job did not end in {timeout_s:g} s\n{self.tail()}')
                if sum(starts.values()) > 40:
                    raise RuntimeError(f'workers die again and again: {starts}\n{self.tail()}')
                if any(worker.exitcode == EXIT_OTHER_BITS for worker in workers):
                    break
                for rank, worker in enumerate(workers):
                    if worker.exitcode not in (None, 0):
                        self._refuse_late_death(store, rank, workers)
                        starts[rank] += 1
                        print(f'rank {rank}: exit code {worker.exitcode}\n{self.tail()}')
                        self._wipe(rank, wipe)
                        if announce:
                            announce_failure(store, rank, f'rank {rank}: {worker.exitcode}')
                        workers[rank] = start(rank)
                if fault is not None:
                    fault(workers, start)
                multiprocessing.connection.wait(
                    [worker.sentinel for worker in workers if worker.exitcode is None], 0.05
                )
        finally:
            _end(workers, started)
        self.attempts += 1
        return {rank: count for rank, count in starts.items() if count}

    def _wipe(self, rank: int, nodes: Collection[int]) -> None:
        """Delete the memory of the node of `rank`, if it is one of `nodes`."""
        node = rank * self.nodes // self.ranks
        if node in nodes:
            shutil.rmtree(self.node_memory(node), ignore_errors=True)

    def _refuse_late_death(self, store: TCPStore, rank: int, workers: list) -> None:
        """Fail as real launchers do: a replacement would wait in vain for finished ranks.

        Raises:
            RuntimeError: some ranks have finished.
        """
        finished = [
            other
            for other, worker in enumerate(workers)
            if worker.exitcode == 0 or read_finished(store, other, worker.pid) is not None
        ]
        if finished:
            raise RuntimeError(
                f'rank {rank} died when ranks {finished} had finished\n{self.tail()}'
            )

    def finish(self, **kwargs: object) -> None:
        """Run to the end; raises with the logs if a rank fails."""
        codes = self.run(**kwargs)  # type: ignore[arg-type]
        assert codes == [0] * self.ranks, f'exit codes {codes}\n{self.tail()}'

    def log(self, rank: int) -> Path:
        """Log of a rank in the present attempt."""
        return self.directory / f'attempt{self.attempts}-rank{rank}.log'

    def tail(self) -> str:
        """End of the logs of the newest attempt that has logs, also of a running one."""
        logs = list(self.directory.glob('attempt*-rank*.log'))
        newest = max(map(_attempt_of, logs), default=0)
        return tails(log for log in logs if _attempt_of(log) == newest)

    def account(self) -> str:
        """Text to show when a test fails: ends of all logs, also of launchers, and events."""
        events = [event for rank in range(self.ranks) for event in self.events(rank)]
        last = sorted(events, key=lambda event: event['time'])[-_EVENTS_SHOWN:]
        return '\n'.join([tails(self.directory.glob('*.log')), '--- events', *map(str, last)])

    def output(self, attempt: int) -> str:
        """Everything all ranks printed in one attempt."""
        return '\n'.join(
            log.read_text(errors='replace')
            for log in sorted(self.directory.glob(f'attempt{attempt}-rank*.log'))
        )

    def events(self, rank: int = 0) -> list[dict]:
        """Events of a rank over all attempts, as decoded lines of the file."""
        return [json.loads(line) for line in self._written(rank).splitlines()]

    def events_of[E: Event](self, kind: type[E], rank: int = 0) -> list[E]:
        """Events of one kind of a rank over all attempts."""
        return kind_of(decode(self._written(rank)), kind)

    def _written(self, rank: int) -> bytes:
        path = self.directory / 'events' / f'rank{rank}.jsonl'
        return path.read_bytes() if path.exists() else b''

    def remove(self) -> None:
        """Delete the host memory of the run."""
        if self.exact_memory:
            for node in range(self.nodes):
                exact_memory.unmount(self.node_memory(node))
        for memory in [self.memory, *self.memory.parent.glob(f'{self.name}.*')]:
            shutil.rmtree(memory, ignore_errors=True)  # with --sparse-ckpt-elastic one a layout

    def _environment(self, rank: int, port: int, fail_at: str) -> dict[str, str]:
        return {
            'RANK': str(rank),
            'LOCAL_RANK': str(rank),  # all share the ports of this machine
            'WORLD_SIZE': str(self.ranks),
            'MASTER_ADDR': '127.0.0.1',
            'MASTER_PORT': str(port),
            'CUDA_DEVICE_MAX_CONNECTIONS': '1',
            'MOEVEMENT_NODE': f'node{rank * self.nodes // self.ranks}',
            'MOEVEMENT_FAIL_AT': fail_at,
            BACKEND: self.backend,
            **self.site(),
            **(secret.variables_of(self.name.encode()) if self.gives_secret else {}),
            **dense_saves.environment(),
            **(exact_memory.environment() if self.exact_memory else {}),
        }

    def _supervise(self, workers: list, timeout_s: float, all_end: bool) -> None:
        deadline = time.monotonic() + timeout_s
        while any(worker.is_alive() for worker in workers):
            if not all_end and any(worker.exitcode not in (None, 0) for worker in workers):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f'job did not end in {timeout_s:g} s\n{self.tail()}')
            multiprocessing.connection.wait([worker.sentinel for worker in workers], 0.02)


def _end(workers: Sequence[Any], before: Sequence[Any] = ()) -> None:
    """Kill workers, and processes left by them or by earlier workers: writers of checkpoints."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join()
    for worker in (*workers, *before):
        if worker.exitcode is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)  # each has a session of its own


def _attempt_of(log: Path) -> int:
    return int(log.name.removeprefix('attempt').partition('-')[0])


def tails(logs: Iterable[Path], characters: int = 3000) -> str:
    return '\n'.join(
        f'--- {log.name}\n{log.read_text(errors="replace")[-characters:]}' for log in sorted(logs)
    )
