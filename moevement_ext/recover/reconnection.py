# SPDX-License-Identifier: Apache-2.0
"""Connects all ranks again: to each other's host memory, and in their process groups.

Replaying ranks connect the groups among themselves before the replay; waiting ranks connect theirs
during it. After the replay only groups with both kinds are left. All ranks must agree about each
group; they do, since `connected_with` follows from the reports of all ranks.
"""

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


def exchange_addresses(
    rank: int, verdict: Localized, membership: Membership, protection: Protection
) -> None:
    """Wait until new processes are set up, and obtain their addresses."""
    store, memory = membership.store, protection.memory
    if rank in verdict.replacements:
        encoded = msgspec.msgpack.encode(memory.addresses[rank])
        store.set(f'address/{rank}', encoded)  # type: ignore[arg-type]
    membership.barrier('ready')
    for other, theirs in enumerate(membership.reports):
        if theirs.address is not None:
            memory.addresses[other] = theirs.address
    for other in verdict.replacements:
        found = store.get(f'address/{other}')
        memory.addresses[other] = _ADDRESS.decode(found)
    newest = verdict.target
    if verdict.window is not None and rank in verdict.beginning:
        newest = verdict.window.start
    protection.reach_peers(newest)
