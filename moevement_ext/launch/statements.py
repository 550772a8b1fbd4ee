# SPDX-License-Identifier: Apache-2.0
"""What workers say of themselves to the launcher, in its store.

Who tells uses the store of the job; the launcher, who is told, the part of it of its launch.

Keys, of a launch: `memory` (directory of the run's host memory), `survivors` (set if workers live
on when another one dies), `finished/<rank>` (process and exit status of a rank that is done:
whatever becomes of the process now, nobody needs another in its place), `joining/<rank>` (process
of a rank that has come to join the others, who from then on see whether it hangs).
"""

import os
from pathlib import Path

from torch.distributed import Store

from moevement_ext.membership.launch import of_launch, own_launch

_MEMORY = 'memory'
_SURVIVORS = 'survivors'


def tell_memory(store: Store, directory: Path) -> None:
    """Host memory of the run is below this directory, on all nodes."""
    _own(store).set(_MEMORY, str(directory))


def told_memory(store: Store) -> Path | None:
    """Where the host memory of the run is; None if nobody said."""
    return Path(store.get(_MEMORY).decode()) if store.check([_MEMORY]) else None


def tell_survivors(store: Store) -> None:
    """Workers of this job go on without a dead one, until it is replaced."""
    _own(store).set(_SURVIVORS, '1')


def told_survivors(store: Store) -> bool:
    """True if a dead worker may be replaced alone; else all are to start again together."""
    return store.check([_SURVIVORS])


def tell_joining(store: Store, rank: int) -> None:
    """This process is about to meet the others."""
    _own(store).set(_joining(rank), str(os.getpid()))


def told_joining(store: Store, rank: int) -> int | None:
    """The newest process of `rank` that came to meet the others; None if none has."""
    return int(store.get(_joining(rank))) if store.check([_joining(rank)]) else None


def tell_finished(store: Store, rank: int, code: int) -> None:
    """This process is done; it will end with exit status `code`."""
    _own(store).set(_finished(rank), f'{os.getpid()} {code}')


def told_finished(store: Store, rank: int, pid: int) -> int | None:
    """The exit status that process `pid` of `rank` announced; None if it was not done yet."""
    if not store.check([_finished(rank)]):
        return None
    process, _, code = store.get(_finished(rank)).decode().partition(' ')
    return int(code) if int(process) == pid else None  # else an earlier process said so


def _own(store: Store) -> Store:
    return of_launch(store, own_launch())


def _joining(rank: int) -> str:
    return f'joining/{rank}'


def _finished(rank: int) -> str:
    return f'finished/{rank}'
