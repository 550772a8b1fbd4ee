# SPDX-License-Identifier: Apache-2.0
"""All ranks of one life of the job meet under a fresh name in the launcher's store.

With static rendezvous the launcher's store outlives its workers and keeps what dead ones wrote;
process groups built on the same names would wait for ranks that are gone. An *epoch* is a set of
processes, one per rank, that agree on a prefix nobody used before. A rank that finds its own
predecessor in the present epoch opens the next one, and everybody follows.
"""

import os
import secrets
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from moevement_ext.errors import SparseCheckpointError

_POLL_SECONDS = 0.02


def launcher_store(timeout: timedelta) -> Store | None:
    """A connection to the store of torchrun's agent, None under any other launcher."""
    if os.environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True':
        return None
    return TCPStore(
        os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False, timeout=timeout
    )


def meet(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Wait for all ranks and return the store of their epoch.

    Args:
        store: outlives the workers.
        rank: of this process.
        world_size: number of processes that must come.
        timeout: how long to wait for the last one.

    Raises:
        SparseCheckpointError: some ranks did not come in time; names them.
    """
    life = secrets.token_hex(8)
    deadline = time.monotonic() + timeout.total_seconds()
    epoch = -1
    while True:
        present = store.add('epoch', 0)
        if present != epoch:
            epoch = present
            if _join(store, epoch, rank, life) != life:  # a predecessor of this rank is in it
                _open_next(store, epoch)
                continue
        missing = [
            other for other in range(world_size) if not store.check([f'join/{epoch}/{other}'])
        ]
        if not missing:
            return PrefixStore(f'epoch/{epoch}', store)
        if time.monotonic() > deadline:
            raise SparseCheckpointError(
                f'Ranks {missing[:8]} did not start within {timeout.total_seconds():g} s. '
                'See the log of their node; --distributed-timeout-minutes sets the time.'
            )
        time.sleep(_POLL_SECONDS)


def _join(store: Store, epoch: int, rank: int, life: str) -> str:
    """Enter the epoch; returns the life that holds this rank's place in it."""
    return store.compare_set(f'join/{epoch}/{rank}', '', life).decode()


def _open_next(store: Store, epoch: int) -> None:
    """Move on from `epoch`, once, whoever asks first."""
    if store.add(f'left/{epoch}', 1) == 1:
        store.add('epoch', 1)
