# SPDX-License-Identifier: Apache-2.0
"""Host memory files of a rank, which its replacement reserves before it builds the model."""

from datetime import timedelta
from pathlib import Path

from moevement_ext.config import node_name
from moevement_ext.membership.exchange import leave, left_by
from moevement_ext.membership.mailbox import write_files
from moevement_ext.membership.membership import Membership
from moevement_ext.membership.rank import Rank
from moevement_ext.membership.rendezvous import launcher_store
from moevement_ext.memory import reservation
from moevement_ext.memory.node_store import NodeStore

_STORE_TIMEOUT = timedelta(seconds=60)
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
