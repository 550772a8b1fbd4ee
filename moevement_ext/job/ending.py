# SPDX-License-Identifier: Apache-2.0
"""The planned end of a process: it waits for those of all ranks, and tells its launcher."""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed import DistError, DistNetworkError, DistStoreError

from moevement_ext.errors import SparseCheckpointError
from moevement_ext.job.joining import own_store
from moevement_ext.logger import logger_of
from moevement_ext.membership.mailbox import write_finished, write_trained
from moevement_ext.membership.membership import Membership
from moevement_ext.membership.rank import Rank
from moevement_ext.membership.rendezvous import (
    Rendezvous,
    RendezvousResult,
    RoundEnded,
    launcher_store,
    present_round,
)
from moevement_ext.recover.whole_job import restart_whole_job

logger = logger_of(__name__)

_STORE_TIMEOUT = timedelta(seconds=10)
_STAY = 'windows stay: %s'
# Another process may save a model before it ends. One that ended unseen (by `os._exit`, or
# without a launcher) never comes.
_LONGEST_END = timedelta(minutes=30)


class LastBarrier:
    """A barrier of all ranks at the ends of their processes. Made by all, while all train."""

    def __init__(self, rank: Rank) -> None:
        self.store = launcher_store(_STORE_TIMEOUT) or own_store(None, rank)
        self._place = Rendezvous(self.store, rank.number, rank.world_size)
        self._round = RendezvousResult(present_round(self.store), self.store, [], self.store)

    def wait(self) -> None:
        """Raises `RoundEnded` if a process was started again, `DistError` without its store.

        Raises `SparseCheckpointError` if some processes do not end.
        """
        self._place.barrier(self._round, 'ended', _LONGEST_END)
        self._place.sign(self._round, 'left')
        if self._place.rank == 0:  # it may serve the store
            self._place.barrier(self._round, 'left', _LONGEST_END)


def trained_together(rank: Rank, membership: Membership | None) -> LastBarrier | None:
    """Wait until all ranks have trained; None if the store is lost.

    Raises `RoundEnded` if a rank was lost before, although NCCL's barrier returns in that case.
    """
    try:
        barrier = LastBarrier(rank)
        torch.distributed.barrier()
        write_trained(barrier.store)  # from now on the launcher restarts all workers
        if membership is not None:
            membership.barrier('trained')
    except (DistNetworkError, DistStoreError) as error:  # no iteration need be computed again
        logger.warning(_STAY, f'the store is lost: {error}')
        return None
    return barrier


def end(
    rank: Rank,
    barrier: LastBarrier | None,
    planned: int,
    remove: bool,
    close: Callable[[bool], None],
    code: int,
) -> None:
    """End this process, whose exit status is `code`, with those of all ranks."""
    if code != planned or barrier is None:
        return  # windows stay
    try:
        barrier.wait()
    except RoundEnded:
        restart_whole_job(rank, 'a worker died after training had ended')
    except DistError as error:
        logger.warning(_STAY, f'the store is lost: {error}')
        return
    except SparseCheckpointError:
        logger.warning(_STAY, f'other ranks have not ended for {_LONGEST_END}')
        return
    announce(rank.number, code)
    close(remove)


def announce(rank: int, code: int) -> None:
    """Report to the launcher that this process is done and will end with exit status `code`."""
    with suppress(DistError):  # the launcher may be gone already
        store = launcher_store(_STORE_TIMEOUT)
        if store is not None:
            write_finished(store, rank, code)
