# SPDX-License-Identifier: Apache-2.0
"""Messages between a launcher and its workers, in the store of the job.

A store may outlive a launch, and messages of an earlier launch refer to processes that are gone. So
a launcher draws a random name for each launch, and all keys below begin with it. Workers pass the
store of the job; the launcher passes the part of its own launch.

Written by workers: `memory` (directory of the run's host memory), `survivors` (set if workers
survive the death of another worker), `finished/<rank>` (process number and exit status of a
finished rank, which needs no replacement even if its process is killed), `joining/<rank>` (process
number of a rank that joins the other ranks, which detect a hang from then on), `files/<rank>`
(files that a rank keeps in host memory), `files` (number of such reports), `needed` (number of
ranks without which the job cannot go on), `recovered` (one line about the newest recovery).

Written by the launcher: `ended/<process>` (time and cause of the death of this process),
`cause/<restarts>` (the same for the death that restarted all workers for this time).
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:  # agents, which use no store, need no torch
    from torch.distributed import Store

VARIABLE = 'MOEVEMENT_LAUNCH'
"""Environment variable of workers with the name of the launch. A launcher that reads nothing from
the store, such as torchrun, does not set it."""
PROCESS = 'MOEVEMENT_PROCESS'
"""Environment variable of a worker with its number; that launcher draws it, else the worker."""


def own_launch() -> str:
    """Name of this process's launch; empty if it has none."""
    return os.environ.get(VARIABLE, '')


def own_process() -> int:
    """Number of this process: a random one, as each container counts process ids from 1."""
    return int(os.environ.setdefault(PROCESS, new_process()))


def new_process() -> str:
    return str(secrets.randbits(63))


def of_launch(store: Store, launch: str) -> Store:
    """The part of a store with the messages of a launch."""
    from torch.distributed import PrefixStore

    return PrefixStore(f'launch/{launch}', store) if launch else store


_RECOVERED = 'recovered'


class End(NamedTuple):
    """The death of a process."""

    rank: int
    how: str = ''
    """For example `was killed by SIGKILL`; empty if unknown."""
    at: float | None = None
    """When its launcher saw it, in seconds since the epoch."""
    node: str = ''
    """Empty if unknown."""


_END = msgspec.json.Decoder(End)


def write_death(store: Store, process: int, rank: int, how: str) -> None:
    """Record a death that the launcher saw; the rank or the whole job is about to restart."""
    _set_end(store, f'ended/{process}', rank, how)


def read_death(store: Store, process: int) -> End | None:
    """How this process died; None if the launcher has not recorded it."""
    return _end(store, f'ended/{process}')


def write_cause(store: Store, restarts: int, rank: int, how: str) -> None:
    """Record that this death causes the restart of all workers, number `restarts`."""
    _set_end(store, f'cause/{restarts}', rank, how)


def read_cause(store: Store, restarts: int) -> End | None:
    """The death that caused restart number `restarts` of all workers; None if unknown."""
    return _end(store, f'cause/{restarts}')


def _set_end(store: Store, key: str, rank: int, how: str) -> None:
    end = End(rank, how, time.time())
    store.set(key, msgspec.json.encode(end))  # type: ignore[arg-type]


def _end(store: Store, key: str) -> End | None:
    found = _peek(store, key)
    return None if found is None else _END.decode(found)


def write_recovery(store: Store, line: str) -> None:
    """Record the outcome of a recovery in one line; called by one rank."""
    store.set(_RECOVERED, line)


def read_recovery(store: Store) -> str:
    """Outcome of the newest recovery; empty if there was none."""
    return _told(store, _RECOVERED)


_MEMORY = 'memory'
_SURVIVORS = 'survivors'
_FILES = 'files'


def write_memory(store: Store, directory: Path) -> None:
    """Report the directory of the run's host memory, the same on all nodes."""
    # Paths may contain bytes that are not UTF-8.
    _own(store).set(_MEMORY, os.fsencode(directory))  # type: ignore[arg-type]


def read_memory(store: Store) -> Path | None:
    found = _peek(store, _MEMORY)
    return None if found is None else Path(os.fsdecode(found))


def write_files(store: Store, rank: int, files: bytes) -> None:
    """Report the files that this rank keeps in host memory; each rank once per run attempt."""
    own = _own(store)
    own.set(f'{_FILES}/{rank}', files)  # type: ignore[arg-type]
    own.add(_FILES, 1)


def read_files(store: Store, world_size: int) -> list[bytes] | None:
    """Return the reported files by rank; None until all ranks have reported."""
    if store.add(_FILES, 0) < world_size:
        return None
    files = [f'{_FILES}/{rank}' for rank in range(world_size)]
    # A replaced rank counts twice, so that some ranks may not have reported yet.
    return store.multi_get(files) if store.check(files) else None


def write_survivors(store: Store) -> None:
    """Report that the other workers survive the death of a worker until it is replaced."""
    _own(store).set(_SURVIVORS, '1')


def write_trained(store: Store) -> None:
    """Report that training has ended, so that no dead worker can be replaced alone any more."""
    _own(store).delete_key(_SURVIVORS)


def read_survivors(store: Store) -> bool:
    """True if a dead worker can be replaced alone; otherwise all workers must restart."""
    return store.check([_SURVIVORS])


def write_joining(store: Store, rank: int) -> None:
    _own(store).set(f'joining/{rank}', str(own_process()))


def read_joining(store: Store, rank: int) -> int | None:
    """Return the number of the newest process of `rank` that joined the others, or None."""
    return _number(store, f'joining/{rank}')


def write_finished(store: Store, rank: int, code: int) -> None:
    """Report that this process is done and will end with exit status `code`."""
    _own(store).set(f'finished/{rank}', f'{own_process()} {code}')


def read_finished(store: Store, rank: int, process: int) -> int | None:
    """Return the exit status that this process of `rank` announced, or None."""
    teller, _, code = _told(store, f'finished/{rank}').partition(' ')
    return int(code) if teller == str(process) else None  # else an earlier process announced it


def _own(store: Store) -> Store:
    return of_launch(store, own_launch())


def _told(store: Store, key: str) -> str:
    """A value, empty if there is none; no process waits for any of these keys."""
    return (_peek(store, key) or b'').decode()


def _peek(store: Store, key: str) -> bytes | None:
    from moevement_ext.store_answers import peek  # imports torch

    return peek(store, key)


def _number(store: Store, key: str) -> int | None:
    return int(told) if (told := _told(store, key)) else None
