# SPDX-License-Identifier: Apache-2.0
"""Which window do all ranks restart from? The newest that everybody can still get."""

from collections.abc import Collection, Sequence

import msgspec


class Candidate(msgspec.Struct, frozen=True, order=True):
    """A window of all ranks: the same start, W and plan digest everywhere."""

    start: int
    window: int
    plan: str

    @property
    def dense_at(self) -> int:
        """Iteration at which its conversion ends: every operator is active and consistent."""
        return self.start + self.window - 1


class HeldWindow(msgspec.Struct, frozen=True, order=True):
    """The part of one owner, committed on some node."""

    candidate: Candidate
    owner: int


def candidates(held: Collection[HeldWindow], world_size: int) -> list[Candidate]:
    """Windows of which every rank's part exists somewhere, the newest dense state first."""
    owners: dict[Candidate, set[int]] = {}
    for part in held:
        owners.setdefault(part.candidate, set()).add(part.owner)
    complete = [found for found, ranks in owners.items() if ranks == set(range(world_size))]
    return sorted(complete, key=lambda found: (found.dense_at, found), reverse=True)


def holders(
    candidate: Candidate, owner: int, inventories: Sequence[Collection[HeldWindow]]
) -> list[int]:
    """Ranks whose node holds `owner`'s part, the owner itself first.

    Args:
        inventories: what each rank's node holds, by rank.
    """
    wanted = HeldWindow(candidate, owner)
    found = [rank for rank, inventory in enumerate(inventories) if wanted in inventory]
    return sorted(found, key=lambda rank: (rank != owner, rank))
