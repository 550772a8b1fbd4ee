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
    while True:
        epoch = store.add('epoch', 0)
        places = [f'join/{epoch}/{other}' for other in range(world_size)]
        answers = [f'here/{epoch}/{other}' for other in range(world_size)]
        # Asked again every time: an epoch with a predecessor of this rank never counts as met.
        if store.compare_set(places[rank], '', life).decode() != life:
            _open_next(store, epoch)
        elif store.check(places):
            # A place may be that of a rank that died waiting; only the living answer.
            store.set(answers[rank], life)
            if store.check(answers):
                return PrefixStore(f'epoch/{epoch}', store)
        if time.monotonic() > deadline:
            missing = [other for other, place in enumerate(places) if not store.check([place])]
            raise SparseCheckpointError(
                f'Ranks {missing[:8]} did not start within {timeout.total_seconds():g} s. '
                'See the log of their node; --distributed-timeout-minutes sets the time.'
            )
        time.sleep(_POLL_SECONDS)


def _open_next(store: Store, epoch: int) -> None:
    """Move on from `epoch`, once, whoever asks first; one step, which a kill cannot cut in two."""
    store.compare_set('epoch', str(epoch), str(epoch + 1))
