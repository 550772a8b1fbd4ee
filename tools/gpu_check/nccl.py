# SPDX-License-Identifier: Apache-2.0
"""Stage: is a rank that is killed made up for, with NCCL's own kernels hanging and aborted?

Each rank is a process; all share one GPU. Again and again one is killed while the others wait for
it; they are unblocked, a new process takes its place, and all groups are connected anew.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
from torch.distributed import TCPStore

from moevement_ext.launch import shared_gpu
from tools.gpu_check.nccl_rank import Measured, Trial
from tools.gpu_check.report import Findings
from tools.gpu_check.settings import Settings
from tools.lab.errors import LabError
from tools.lab.launch import ENVIRONMENT, ROOT

_LIMIT_S = 160
"""For a trial; the whole stage has three."""
_OPEN_LIMIT_S = 60
"""For all to be connected anew, once all have begun, where a group was left open on purpose."""
_DRIFT = {'descriptors': 4, 'threads': 0, 'memory_mib': 100, 'gpu_used_mib': 64}
"""Most that may be added from the second to the last time a process has connected anew.

The first times libraries take what they keep (76 MiB on an H200 with NCCL 2.28). Groups that leave
something behind add more, for each rank has five or six. But a watch of NCCL's own (RAS) tries for
a minute, once a second, to reach the process that has died, each time by another socket.
"""
_POLL_S = 0.02
_PARTING_S = 0.3
"""From the word that a rank is to die to its death: the others are in their operation by then."""


class Case(NamedTuple):
    """One trial."""

    ranks: int
    victims: tuple[int, ...]
    """One is killed in each cycle."""
    mend: bool = True
    """What closes an NCCL group that an exception has left open is in place."""


class NotRenewed(LabError):
    """All had begun to connect their groups anew, and that failed."""


_CASES = {
    '2 ranks': Case(2, (1, 1, 1, 0)),
    '3 ranks': Case(3, (2, 1, 2)),
}


def run(settings: Settings) -> Iterator[Findings]:
    """All trials; on a GPU also the one that must fail."""
    for name, case in _CASES.items():
        try:
            measured = run_case(case, settings)
        except LabError as error:
            yield Findings({}, [f'{name}: {error}'])
            continue
        drift = worst_drift(measured)
        cycles = {'drift': drift, 'cycles': msgspec.to_builtins(measured)}
        problems = [f'{name}: {problem}' for problem in judge(drift)]
        yield Findings({**_shown(case.ranks, measured), name: cycles}, problems)
    if settings.gpu:  # gloo has no groups that could stay open
        without_mend, nothing_shown = control(settings)
        yield Findings({'without_mend': without_mend}, nothing_shown)


def _shown(ranks: int, measured: list[Measured]) -> dict[str, Any]:
    return {
        f'unblock_s_{ranks}': max(cycle.unblock_s for cycle in measured),
        f'renew_s_{ranks}': max(cycle.renew_s for cycle in measured),
        f'first_send_{ranks}': '; '.join(sorted({cycle.first_send for cycle in measured})),
        f'next_send_{ranks}': '; '.join(sorted({cycle.next_send for cycle in measured})),
        f'left_open_{ranks}': max(cycle.left_open for cycle in measured),
    }


def control(settings: Settings) -> tuple[str, list[str]]:
    """The trial in which an NCCL group stays open, whose groups must not be connected anew.

    Returns:
        What went wrong with that, and what is wrong if the trial does not show it.
    """
    try:
        run_case(Case(2, (1,), mend=False), settings)
        otherwise = 'all came back'
    except NotRenewed as error:
        return str(error).splitlines()[0], []
    except LabError as error:
        otherwise = f'it failed at something else: {str(error).splitlines()[0]}'
    return 'shown nothing', [
        f'without the mend for groups left open, connecting anew must fail, but {otherwise}: '
        'this does not show that the mend works'
    ]


def worst_drift(measured: list[Measured]) -> dict[str, float]:
    """What the process that grew most has more than after its second cycle."""
    worst = dict.fromkeys(_DRIFT, 0.0)
    for pid in {cycle.pid for cycle in measured}:
        life = [cycle for cycle in measured if cycle.pid == pid]
        for name in worst:
            growth = life[-1].resources[name] - life[:2][-1].resources[name]
            worst[name] = max(worst[name], growth)
    return worst


def judge(drift: Mapping[str, float]) -> list[str]:
    """What has grown too much."""
    return [f'{what} grew by {by:g}' for what, by in drift.items() if by > _DRIFT[what]]


def run_case(case: Case, settings: Settings) -> list[Measured]:
    """One trial to its end.

    Returns:
        What survivors measured in each cycle, in order of cycle and rank.

    Raises:
        NotRenewed: groups were not connected anew, or a sum in them was wrong.
        LabError: a rank failed otherwise, or did not come.
    """
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    with _processes(case, store, settings) as processes:
        processes.conduct()
    found = []
    for cycle, victim in enumerate(case.victims):
        for rank in set(range(case.ranks)) - {victim}:
            found.append(msgspec.json.decode(store.get(f'measured/{cycle}/{rank}'), type=Measured))
    return found


@contextmanager
def _processes(case: Case, store: TCPStore, settings: Settings) -> Iterator['_Ranks']:
    ranks = _Ranks(case, store, settings)
    try:
        yield ranks
    finally:
        ranks.end()


class _Ranks:
    """The processes of a trial; tells through the store who dies when."""

    def __init__(self, case: Case, store: TCPStore, settings: Settings) -> None:
        self._case = case
        self._store = store
        self._settings = settings
        self._allow(_LIMIT_S)
        self._running = {rank: self._start(rank, 0) for rank in range(case.ranks)}

    def conduct(self) -> None:
        """Kill and replace until all cycles are done."""
        for cycle, victim in enumerate(self._case.victims):
            self._await(f'ready/{cycle}')
            self._store.set(f'victim/{cycle}', str(victim))
            time.sleep(_PARTING_S)  # the moment to strike, not a synchronisation
            self._running[victim].send_signal(signal.SIGKILL)
            self._running[victim].wait()
            self._store.set(f'killed/{cycle}', '')
            self._running[victim] = self._start(victim, cycle + 1)
            self._await_renewal(cycle)
        last = len(self._case.victims)
        self._await(f'ready/{last}')
        self._store.set(f'victim/{last}', '-1')
        for rank, process in self._running.items():
            try:
                code = process.wait(max(0.0, self._left()))
            except subprocess.TimeoutExpired:
                raise LabError(f'rank {rank} did not end within {self._limit_s:g} s') from None
            if code:
                raise LabError(f'rank {rank} ended with exit status {code}')

    def _await_renewal(self, cycle: int) -> None:
        self._await(f'renewing/{cycle}')
        if not self._case.mend:  # the time of the starts is no part of it
            self._allow(_OPEN_LIMIT_S)
        try:
            self._await(f'renewed/{cycle}')
        except LabError as error:
            raise NotRenewed(str(error)) from error

    def end(self) -> None:
        """Leave nothing."""
        for process in self._running.values():
            process.kill()
            process.wait()

    def _start(self, rank: int, cycle: int) -> subprocess.Popen[bytes]:
        trial = Trial(
            backend=self._settings.backend,
            rank=rank,
            ranks=self._case.ranks,
            port=self._store.port,
            cycle=cycle,
            mend=self._case.mend,
        )
        command = [sys.executable, '-m', 'tools.gpu_check.nccl_rank']
        command.append(msgspec.json.encode(trial).decode())
        return subprocess.Popen(command, cwd=ROOT, env=self._environment(rank))

    def _environment(self, rank: int) -> Mapping[str, str]:
        environment = {**os.environ, **ENVIRONMENT, 'RANK': str(rank)}
        shared_gpu.share(environment)
        return environment

    def _await(self, what: str) -> None:
        """Wait until all ranks have said so."""
        missing = set(range(self._case.ranks))
        while missing := {rank for rank in missing if not self._store.check([f'{what}/{rank}'])}:
            self._raise_if_failed(what)
            time.sleep(_POLL_S)

    def _raise_if_failed(self, what: str) -> None:
        for rank, process in self._running.items():
            if self._store.check([f'failed/{rank}']):
                raise LabError(f'rank {rank}: {self._store.get(f"failed/{rank}").decode()}')
            if process.poll() is not None:
                raise LabError(f'rank {rank} ended with exit status {process.returncode}')
        if self._left() <= 0:
            raise LabError(f'not all were {what} within {self._limit_s:g} s')

    def _allow(self, seconds: float) -> None:
        """All that is to come must be done by then."""
        self._limit_s = seconds
        self._deadline = time.monotonic() + seconds

    def _left(self) -> float:
        return self._deadline - time.monotonic()
