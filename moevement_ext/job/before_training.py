# SPDX-License-Identifier: Apache-2.0
"""Checks before training, and hang detection, which starts when all ranks are connected."""

from collections.abc import Callable
from datetime import timedelta

from moevement_ext.config import ConfigurationError
from moevement_ext.errors import HostMemoryError
from moevement_ext.membership.mailbox import own_process
from moevement_ext.membership.rank import Rank
from moevement_ext.membership.rendezvous import launcher_store
from moevement_ext.membership.standstill import Guard
from moevement_ext.memory import limits
from moevement_ext.protect.protection import Protection
from moevement_ext.regroup import waits

_STORE_TIMEOUT = timedelta(seconds=60)


def refuse_without_load(load_dense: Callable[[], None] | None, dense_iteration: int) -> None:
    """Refuse a dense checkpoint that could not be loaded once windows prove unusable.

    Otherwise training would start over with the weights from `build`.
    """
    if dense_iteration >= 0 and load_dense is None:
        raise ConfigurationError(
            f'job.set_up was given dense_iteration={dense_iteration} without load_dense, the '
            'function that loads that checkpoint if windows prove unusable; give both.'
        )


def check_loaded(iteration: int, dense_iteration: int) -> None:
    """Check that a trainer without windows, at `iteration`, has loaded the dense checkpoint."""
    if iteration == 0 < dense_iteration:
        raise ConfigurationError(
            f'job.set_up was given dense_iteration={dense_iteration}, but training would begin at '
            'iteration 0: load that checkpoint and set trainer.iteration, in build(True) and in '
            'load_dense().'
        )


def check_limits(rank: Rank, protection: Protection | None, joining: bool) -> None:
    """Check the system limits that a recovery needs. Training thread.

    `protection` is None for unprotected training; `joining`: this process replaces a lost one.
    Raises `HostMemoryError` if a limit on this rank is too low, and protection is required.
    """
    if protection is None or joining:
        return
    ranks = len(protection.memory.plan.ranks)
    for reason in limits.shortages(ranks, limits.over_infiniband(rank.backend)):
        if rank.config.strict:
            raise HostMemoryError(reason)
        rank.events.reduced(reason)


def guarded(rank: Rank) -> Guard | None:
    """Start hang detection; None without a launcher's store. Collective."""
    processes = rank.exchange('processes', str(own_process()).encode())
    store = launcher_store(_STORE_TIMEOUT)
    if store is None:
        return None
    timeouts = rank.config.hang_timeout, rank.config.stuck_timeout
    waits.show()  # the guard must not end processes that wait for other ranks
    return Guard(store, rank.number, [int(process) for process in processes], *timeouts)
