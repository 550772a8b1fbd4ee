# SPDX-License-Identifier: Apache-2.0
"""Connects all ranks again: to each other's host memory, and in their process groups.

Replaying ranks connect the groups among themselves before the replay; waiting ranks connect theirs
during it. After the replay only groups with both kinds are left. All ranks must agree about each
group; they do, since `connected_with` follows from the reports of all ranks.
"""

import time
from collections.abc import Sequence

import msgspec

from moevement_ext.membership.membership import Membership
from moevement_ext.membership.report import Report
from moevement_ext.protect.protection import Protection
from moevement_ext.recover.verdict import Localized

_ADDRESS = msgspec.msgpack.Decoder(tuple[str, int])


def connected_with(rank: int, verdict: Localized, reports: Sequence[Report]) -> frozenset[int]:
    """Return the ranks, including `rank`, connected with `rank` when the replay ends.

    These sets partition the ranks. `verdict` is the newest one, from `reports`; replays that
    continue are connected since they began.
    """
    if rank in verdict.beginning:
        return verdict.beginning
    if rank in verdict.going_on:
        round = _connected_in(reports[rank])
        return frozenset(
            other for other in verdict.going_on if _connected_in(reports[other]) == round
        )
    return frozenset(range(len(reports))) - verdict.ranks


def _connected_in(report: Report) -> int:
    assert report.under_way is not None  # otherwise its stage would begin from scratch
    return report.under_way.round


class Reconnection:
    """Connections of one rank in a recovery. Training thread only."""

    def __init__(self, rank: int, membership: Membership, protection: Protection) -> None:
        self._rank = rank
        self._membership = membership
        self._protection = protection

    def exchange_addresses(self, verdict: Localized) -> None:
        """Wait until new processes are set up, and obtain their addresses."""
        store, memory = self._membership.store, self._protection.memory
        rank = self._rank
        if rank in verdict.replacements:
            encoded = msgspec.msgpack.encode(memory.addresses[rank])
            store.set(f'address/{rank}', encoded)  # type: ignore[arg-type]
        self._membership.barrier('ready')
        for other, theirs in enumerate(self._membership.reports):
            if theirs.address is not None:
                memory.addresses[other] = theirs.address
        for other in verdict.replacements:
            found = store.get(f'address/{other}')
            memory.addresses[other] = _ADDRESS.decode(found)
        newest = verdict.target
        if verdict.window is not None and rank in verdict.beginning:
            newest = verdict.window.start
        self._protection.reach_peers(newest)

    def early(self, verdict: Localized) -> float:
        """Connect this rank with the ranks that replay with it, or that wait with it.

        Returns the seconds taken. Raises `RoundEnded` if another failure was announced
        meanwhile.
        """
        began = time.perf_counter()
        self._membership.renew(self._connected_with(verdict))
        return time.perf_counter() - began

    def of_all(self, verdict: Localized) -> float:
        """Connect all ranks, once no rank replays; see `early`."""
        began = time.perf_counter()
        kept = self._connected_with(verdict)
        if len(kept) < len(self._membership.reports):
            self._membership.renew(None, kept)
        return time.perf_counter() - began

    def _connected_with(self, verdict: Localized) -> frozenset[int]:
        return connected_with(self._rank, verdict, self._membership.reports)
