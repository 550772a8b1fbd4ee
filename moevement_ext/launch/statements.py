# SPDX-License-Identifier: Apache-2.0
"""Reports of workers to the launcher, through its store.

Workers write to the store of the job; the launcher reads the keys of its own launch there.

Keys of a launch: `memory` (directory of the run's host memory), `survivors` (set if workers survive
the death of another worker), `finished/<rank>` (process number and exit status of a finished rank,
which needs no replacement even if its process is killed), `joining/<rank>` (process number of a
rank that joins the other ranks, which detect a hang from then on), `files/<rank>` (files that a
rank keeps in host memory), `files` (number of such reports), `needed` (number of ranks without
which the job cannot go on).
"""

import os
from pathlib import Path

from torch.distributed import Store

from moevement_ext.membership.launch import of_launch, own_launch, own_process

_MEMORY = 'memory'
_SURVIVORS = 'survivors'
_FILES = 'files'
_NEEDED = 'needed'


def tell_memory(store: Store, directory: Path) -> None:
    """Report the directory of the run's host memory, the same on all nodes."""
    # Paths may contain bytes that are not UTF-8.
    _own(store).set(_MEMORY, os.fsencode(directory))  # type: ignore[arg-type]


def told_memory(store: Store) -> Path | None:
    return Path(os.fsdecode(store.get(_MEMORY))) if store.check([_MEMORY]) else None


def tell_files(store: Store, rank: int, files: bytes) -> None:
    """Report the files that this rank keeps in host memory; each rank once per run attempt."""
    own = _own(store)
    own.set(f'{_FILES}/{rank}', files)  # type: ignore[arg-type]
    own.add(_FILES, 1)


def told_files(store: Store, world_size: int) -> list[bytes] | None:
    """Return the reported files by rank; None until all ranks have reported."""
    if store.add(_FILES, 0) < world_size:
        return None
    files = [f'{_FILES}/{rank}' for rank in range(world_size)]
    # A replaced rank counts twice, so that some ranks may not have reported yet.
    return store.multi_get(files) if store.check(files) else None


def tell_needed(store: Store, ranks: int) -> None:
    """Report that the job ends, and can continue with `ranks` ranks."""
    _own(store).set(_NEEDED, str(ranks))


def told_needed(store: Store) -> int | None:
    """The number of ranks that the job needs; None if no worker reported it."""
    return int(store.get(_NEEDED)) if store.check([_NEEDED]) else None


def tell_survivors(store: Store) -> None:
    """Report that the other workers survive the death of a worker until it is replaced."""
    _own(store).set(_SURVIVORS, '1')


def tell_trained(store: Store) -> None:
    """Report that training has ended, so that no dead worker can be replaced alone any more."""
    _own(store).delete_key(_SURVIVORS)


def told_survivors(store: Store) -> bool:
    """True if a dead worker can be replaced alone; otherwise all workers must restart."""
    return store.check([_SURVIVORS])


def tell_joining(store: Store, rank: int) -> None:
    _own(store).set(_joining(rank), str(own_process()))


def told_joining(store: Store, rank: int) -> int | None:
    """Return the number of the newest process of `rank` that joined the others, or None."""
    return int(store.get(_joining(rank))) if store.check([_joining(rank)]) else None


def tell_finished(store: Store, rank: int, code: int) -> None:
    """Report that this process is done and will end with exit status `code`."""
    _own(store).set(_finished(rank), f'{own_process()} {code}')


def told_finished(store: Store, rank: int, process: int) -> int | None:
    """Return the exit status that this process of `rank` announced, or None."""
    if not store.check([_finished(rank)]):
        return None
    teller, _, code = store.get(_finished(rank)).decode().partition(' ')
    return int(code) if int(teller) == process else None  # else an earlier process announced it


def _own(store: Store) -> Store:
    return of_launch(store, own_launch())


def _joining(rank: int) -> str:
    return f'joining/{rank}'


def _finished(rank: int) -> str:
    return f'finished/{rank}'
