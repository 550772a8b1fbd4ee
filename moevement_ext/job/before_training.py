# SPDX-License-Identifier: Apache-2.0
"""Checks before training, early reservation of a replacement's memory, and hang detection."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from moevement_ext.config import ConfigurationError, node_name
from moevement_ext.errors import HostMemoryError
from moevement_ext.membership.exchange import leave, left_by
from moevement_ext.membership.mailbox import write_files
from moevement_ext.membership.membership import Membership
from moevement_ext.membership.rank import Rank
from moevement_ext.membership.rendezvous import launcher_store
from moevement_ext.membership.standstill import Guard
from moevement_ext.memory import limits, reservation
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.protect.protection import Reserved
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


def check_limits(rank: Rank, reserved: Reserved | None, joining: bool) -> None:
    """Check the system limits that a recovery needs. Training thread.

    `reserved` is None for unprotected training; `joining`: this process replaces a lost one.
    Raises `HostMemoryError` if a limit on this rank is too low, and protection is required.
    """
    if reserved is None or joining:
        return
    ranks = len(reserved.memory.plan.ranks)
    for reason in limits.shortages(ranks, limits.over_infiniband(rank.backend)):
        if rank.config.strict:
            raise HostMemoryError(reason)
        rank.events.reduced(reason)


def guarded(rank: Rank) -> Guard | None:
    """Start the detection of a stuck training thread; None without a launcher's store."""
    store = launcher_store(_STORE_TIMEOUT)
    if store is None:
        return None
    waits.show()  # the guard must not end processes that wait for other ranks
    return Guard(store, rank.number, rank.config.hang_timeout, rank.config.stuck_timeout)


# Store key of a rank's list of files.
_FILES = 'files'


def node_store(rank: Rank) -> NodeStore:
    return NodeStore(Path(rank.config.dir), rank.run_id, node_name())


def reserve_early(rank: Rank, membership: Membership | None) -> reservation.EarlyReservation | None:
    """Start reserving the files that the lost predecessor has listed; None without a list."""
    left = None if membership is None else left_by(membership.archive, _FILES, rank.number)
    if left is None:
        return None
    return reservation.EarlyReservation(node_store(rank), rank.number, reservation.decode(left))


def leave_for_successors(rank: Rank, membership: Membership | None, store: NodeStore) -> None:
    """Publish the list of this rank's files for a later replacement and for the launcher."""
    if membership is None:
        return
    files = reservation.encode(reservation.kept_by(store, rank.number))
    leave(membership.archive, _FILES, rank.number, files)
    launcher = launcher_store(_STORE_TIMEOUT)
    if launcher is not None:
        write_files(launcher, rank.number, files)
