# SPDX-License-Identifier: Apache-2.0
"""Events of whole runs: two stages of two ranks, windows of 2 iterations, 1 s each."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from moevement_ext.events import (
    Event,
    FailureDetected,
    Finished,
    JobDescribed,
    LossLogged,
    Protected,
    Recovered,
    RecoveryPhase,
    RecoveryStarted,
    Resharded,
    WindowCommitted,
    WindowPersisted,
    WorkerStarted,
)
from tests.unit.tools.samples import event

RANKS = range(4)
LOST = 2
EXPOSED_S = 0.1
"""Of each iteration."""
OPERATORS = {'layer1.router': (12, 2), 'layer1.expert0': (240, 40), 'layer1.expert1': (240, 40)}
JOB: dict[str, Any] = {
    'train_iterations': 18, 'model': '2 layers', 'layout': {'ranks': 4, 'pipeline': 2},
    'versions': {'torch': '2.15'}, 'command': ['pretrain_gpt.py', '--num-layers', '2'],
}  # fmt: skip
_SECONDS = {'detect': 0.5, 'respawn': 2.0, 'regroup': 0.5, 'convert': 1.0, 'catch_up': 1.0}


def stage_of(rank: int) -> int:
    return rank // 2


def starts(rank: int, created: float, pid: int, start_up_s: float = 1.0) -> list[Event]:
    """A process, and 1 s later its protection."""
    started = created + start_up_s
    place: dict[str, Any] = {
        'node': f'node{rank}', 'stage': stage_of(rank), 'world_size': 4, 'copies': 1,
        'replicas': 1, 'window': 2, 'host_memory': {'own_windows': 2000, 'log_ring': 48},
        'operators': OPERATORS, 'experts': ['layer1.expert0', 'layer1.expert1'],
    }  # fmt: skip
    return [
        event(WorkerStarted, rank, started, pid=pid, start_up_s=start_up_s),
        event(Protected, rank, started + 1, pid=pid, **place),
    ]


def trains(rank: int, pid: int, began: float, first: int, last: int) -> list[Event]:
    """Iterations after `first` up to `last`; both are even."""
    found: list[Event] = []
    for start in range(first, last, 2):
        done = start + 2 - first
        fields: dict[str, Any] = {'pid': pid, 'iteration': start + 2, 'start': start, 'plan': 'a'}
        committed = event(
            WindowCommitted, rank, began + done, **fields, slots=[300, 240],
            training_s=float(done), exposed_s=EXPOSED_S * done,
            copy_bytes_per_s=1e9, send_bytes_per_s=1e8,
        )  # fmt: skip
        found += [committed, event(WindowPersisted, rank, began + done + 0.25, **fields)]
    return found


def localized_run(finished: bool = True) -> list[Event]:
    """Up to iteration 8 at 10 s; rank 2 is lost, back at 15 s; up to iteration 18 at 25 s.

    Its predecessor was killed in the middle of iteration 9; survivors noticed at 10.5 s.
    """
    found: list[Event] = []
    found += [event(LossLogged, 3, 24.5, pid=13, iteration=18, loss=4.5)]
    for rank in RANKS:
        pid = 10 + rank
        found += [*starts(rank, 0.0, pid), *trains(rank, pid, 2.0, 0, 8)]
        if rank == 0:
            found.append(event(JobDescribed, 0, 1.0, pid=pid, **JOB))
        back: dict[str, Any] = {
            'scope': 'localized', 'target': 8, 'stages': [1], 'replacements': [LOST], 'copied': [],
            'iteration': 8, 'seconds': _SECONDS,
        }  # fmt: skip
        if rank == LOST:
            pid = 99
            found += starts(rank, 10.6, pid)
            found.append(event(RecoveryPhase, rank, 12.7, pid=pid, phase='respawn'))
        else:
            found.append(event(RecoveryPhase, rank, 10.4, pid=pid, iteration=8, phase='detect'))
            killed = 'rank 2 (pid 12) was killed by SIGKILL'
            noticed = event(FailureDetected, rank, 10.5, pid=pid, iteration=8, reason=killed)
            found.append(noticed)
        if stage_of(rank) == stage_of(LOST):
            found.append(event(RecoveryStarted, rank, 13.0, pid=pid, start=4, dense_at=5))
            back |= {'replayed': 4, 'verified': 3, 'verified_at': 7}
        found.append(event(Recovered, rank, 15.0, pid=pid, **back))
        found += trains(rank, pid, 15.0, 8, 18)
        if finished:
            found.append(event(Finished, rank, 26.0, pid=pid, iteration=18, removed=True))
    return sorted(found, key=lambda item: item.time)


def restarted_run() -> list[Event]:
    """All workers are killed after iteration 8 at 10 s; they are back at 15 s, up to 18 at 25 s."""
    found: list[Event] = []
    for rank in RANKS:
        found += [*starts(rank, 0.0, 10 + rank), *trains(rank, 10 + rank, 2.0, 0, 8)]
        pid = 50 + rank
        started, protected = starts(rank, 11.0, pid)
        found += [
            started,
            event(FailureDetected, rank, 12.2, pid=pid, committed=8, windows=1),
            event(RecoveryStarted, rank, 12.5, pid=pid, start=4, dense_at=5),
            protected,
            event(Recovered, rank, 15.0, pid=pid, iteration=8, replayed=4, verified=2,
                  verified_at=7, differing=['layer1.router'] if rank == 3 else [],
                  seconds={'find': 0.25, 'convert': 2.0}),
            *trains(rank, pid, 15.0, 8, 18),
            event(Finished, rank, 26.0, pid=pid, iteration=18, removed=True),
        ]  # fmt: skip
    return sorted(found, key=lambda item: item.time)


def resharded_run(finished: bool = True) -> list[Event]:
    """All is lost after iteration 8 at 10 s; two ranks go on from there at 15 s, up to 18 at 25 s.

    They are one stage, and picked up the windows of the four.
    """
    found: list[Event] = [event(JobDescribed, 0, 1.0, pid=10, **JOB)]
    for rank in RANKS:
        found += [*starts(rank, 0.0, 10 + rank), *trains(rank, 10 + rank, 2.0, 0, 8)]
    smaller = {**JOB, 'layout': {'ranks': 2, 'pipeline': 1}}
    found.append(event(JobDescribed, 0, 12.0, pid=50, **smaller))
    for rank in range(2):
        pid = 50 + rank
        started, protected = starts(rank, 11.0, pid)
        place = msgspec.structs.replace(protected, stage=0, world_size=2)
        was: dict[str, Any] = {'start': 7, 'dense_at': 7, 'was': '4 ranks (PP 2, DP 2)'}
        found += [
            started,
            event(Resharded, rank, 12.5, pid=pid, **was, local_bytes=9, remote_bytes=5, seconds=1),
            event(RecoveryStarted, rank, 12.6, pid=pid, start=7, dense_at=7),
            place,
            event(Recovered, rank, 15.0, pid=pid, iteration=8, replayed=1, verified=0,
                  verified_at=None, seconds={'find': 0.25, 'convert': 2.0}),
            *trains(rank, pid, 15.0, 8, 18),
        ]  # fmt: skip
        if finished:
            found.append(event(Finished, rank, 26.0, pid=pid, iteration=18, removed=True))
    return sorted(found, key=lambda item: item.time)


def started_over() -> list[Event]:
    """All is lost after iteration 8 at 10 s, windows too; the job is at iteration 4 at 16.5 s."""
    found: list[Event] = []
    for rank in RANKS:
        found += [*starts(rank, 0.0, 10 + rank), *trains(rank, 10 + rank, 2.0, 0, 8)]
        found += [*starts(rank, 11.0, 50 + rank), *trains(rank, 50 + rank, 12.5, 0, 4)]
    return sorted(found, key=lambda item: item.time)


def write(folder: Path, events: Sequence[Event]) -> Path:
    """Files as `EventLog` writes them; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in events:
        with (folder / f'rank{one.rank}.jsonl').open('ab') as file:
            file.write(_line(one))
    return folder


def _line(one: Event) -> bytes:
    common = {'time': one.time, 'event': one.name, 'rank': one.rank, 'pid': one.pid,
              'iteration': one.iteration}  # fmt: skip
    return msgspec.json.encode({**common, **one.own_fields()}) + b'\n'
