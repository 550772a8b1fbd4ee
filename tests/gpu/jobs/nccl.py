# SPDX-License-Identifier: Apache-2.0
"""Check: replaces killed ranks, with NCCL's own kernels hanging and aborted.

Each rank is a process; all share one GPU. In each cycle one rank is killed while the others wait
for it in a collective; they are unblocked, a new process replaces the killed one, and all groups
are reconnected.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, NamedTuple

import msgspec
from torch.distributed import TCPStore

from moevement_ext.launch import shared_gpu
from tests.gpu.jobs.findings import Findings, Settings
from tests.gpu.jobs.nccl_rank import Measured, Trial
from tools.lab.launch import ENVIRONMENT, ROOT
from tools.lab.programs import LabError

# Time limit of a trial.
_LIMIT_S = 160
# Time limit to reconnect all groups, once all ranks have begun, where a group stays open on
# purpose.
_OPEN_LIMIT_S = 60
# Limits of the growth from the second to the last time that a process has reconnected.
#
# At first, libraries take memory that they keep (76 MiB on an H200 with NCCL 2.28). Leaking groups
# add more, as each rank has five or six. But NCCL's own watch (RAS) tries to reach the dead process
# once a second for a minute, each time by a new socket.
_DRIFT = {'descriptors': 4, 'threads': 0, 'memory_mib': 100, 'gpu_used_mib': 64}
_POLL_S = 0.02
# Time from the order to kill a rank to its death: the others have entered their operation by then.
_PARTING_S = 0.3


class Case(NamedTuple):
    ranks: int
    victims: tuple[int, ...]
    """The rank killed in each cycle."""
    repair: bool = True
    """Close NCCL groups that an exception has left open."""


class NotRenewed(LabError):
    """All ranks had begun to reconnect their groups, and failed."""


_CASES = {
    '2 ranks': Case(2, (1, 1, 1, 0)),
    '3 ranks': Case(3, (2, 1, 2)),
}


def run(settings: Settings) -> Iterator[Findings]:
    """Run all trials; on a GPU also the trial that must fail."""
    for name, case in _CASES.items():
        try:
            measured = run_case(case, settings.backend)
        except LabError as error:
            yield Findings({}, [f'{name}: {error}'])
            continue
        drift = worst_drift(measured)
        cycles = {'drift': drift, 'cycles': msgspec.to_builtins(measured)}
        problems = [f'{name}: {problem}' for problem in judge(drift)]
        yield Findings({**_shown(case.ranks, measured), name: cycles}, problems)
    if settings.gpu:  # gloo has no groups that could stay open
        without_repair, nothing_shown = control(settings.backend)
        yield Findings({'without_repair': without_repair}, nothing_shown)


def _shown(ranks: int, measured: list[Measured]) -> dict[str, Any]:
    return {
        f'unblock_s_{ranks}': max(cycle.unblock_s for cycle in measured),
        f'renew_s_{ranks}': max(cycle.renew_s for cycle in measured),
        f'first_send_{ranks}': '; '.join(sorted({cycle.first_send for cycle in measured})),
        f'next_send_{ranks}': '; '.join(sorted({cycle.next_send for cycle in measured})),
        f'left_open_{ranks}': max(cycle.left_open for cycle in measured),
    }


def control(backend: str) -> tuple[str, list[str]]:
    """Run the trial in which an NCCL group stays open, so that reconnecting must fail.

    Returns:
        The error of the trial, and problems if the trial did not fail as expected.
    """
    try:
        run_case(Case(2, (1,), repair=False), backend)
        otherwise = 'all came back'
    except NotRenewed as error:
        return str(error).splitlines()[0], []
    except LabError as error:
        otherwise = f'it failed at something else: {str(error).splitlines()[0]}'
    return 'shown nothing', [
        f'without the repair for groups left open, reconnecting must fail, but {otherwise}: '
        'this does not show that the repair works'
    ]


def worst_drift(measured: list[Measured]) -> dict[str, float]:
    """Growth since the second cycle, on the process that grew most."""
    worst = dict.fromkeys(_DRIFT, 0.0)
    for pid in {cycle.pid for cycle in measured}:
        attempt = [cycle for cycle in measured if cycle.pid == pid]
        for name in worst:
            growth = attempt[-1].resources[name] - attempt[:2][-1].resources[name]
            worst[name] = max(worst[name], growth)
    return worst


def judge(drift: Mapping[str, float]) -> list[str]:
    return [f'{what} grew by {by:g}' for what, by in drift.items() if by > _DRIFT[what]]


def run_case(case: Case, backend: str) -> list[Measured]:
    """Run one trial to its end.

    Returns:
        Measurements of survivors in each cycle, in order of cycle and rank.

    Raises:
        NotRenewed: groups were not reconnected, or a sum in them was wrong.
        LabError: a rank failed in another way, or did not start.
    """
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    with closing(_Ranks(case, store, backend)) as ranks:
        ranks.conduct()
    found = []
    for cycle, victim in enumerate(case.victims):
        for rank in set(range(case.ranks)) - {victim}:
            found.append(msgspec.json.decode(store.get(f'measured/{cycle}/{rank}'), type=Measured))
    return found


class _Ranks:
    """The processes of a trial; announces through the store which rank dies when."""

    def __init__(self, case: Case, store: TCPStore, backend: str) -> None:
        self._case = case
        self._store = store
        self._backend = backend
        self._allow(_LIMIT_S)
        self._running = {rank: self._start(rank, 0) for rank in range(case.ranks)}

    def conduct(self) -> None:
        for cycle, victim in enumerate(self._case.victims):
            self._await(f'ready/{cycle}')
            self._store.set(f'victim/{cycle}', str(victim))
            time.sleep(_PARTING_S)  # the time of the kill, no synchronisation
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
        if not self._case.repair:  # the limit excludes the start of processes
            self._allow(_OPEN_LIMIT_S)
        try:
            self._await(f'renewed/{cycle}')
        except LabError as error:
            raise NotRenewed(str(error)) from error

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def _start(self, rank: int, cycle: int) -> subprocess.Popen[bytes]:
        trial = Trial(
            backend=self._backend,
            rank=rank,
            ranks=self._case.ranks,
            port=self._store.port,
            cycle=cycle,
            repair=self._case.repair,
        )
        command = [sys.executable, '-m', 'tests.gpu.jobs.nccl_rank']
        command.append(msgspec.json.encode(trial).decode())
        return subprocess.Popen(command, cwd=ROOT, env=self._environment(rank))

    def _environment(self, rank: int) -> Mapping[str, str]:
        environment = {**os.environ, **ENVIRONMENT, 'RANK': str(rank)}
        shared_gpu.share(environment)
        return environment

    def _await(self, what: str) -> None:
        """Wait until all ranks have announced `what`."""
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
        """Limit the time of all remaining steps."""
        self._limit_s = seconds
        self._deadline = time.monotonic() + seconds

    def _left(self) -> float:
        return self._deadline - time.monotonic()
