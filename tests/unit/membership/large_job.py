# SPDX-License-Identifier: Apache-2.0
"""Reports of the ranks of a large job after a failure."""

from dataclasses import dataclass

from moevement_ext.membership.report import Report
from moevement_ext.memory.window.name import HeldWindow, Window, WindowName

RANKS_PER_NODE = 8
REPLICAS = 2
WINDOW = 4


@dataclass(frozen=True)
class LargeJob:
    """Survivors hold windows of the ranks of their node and replicas of other nodes."""

    world_size: int

    def report(self, rank: int, origin: int, committed: int) -> Report:
        newest = committed - committed % WINDOW
        first = rank - rank % RANKS_PER_NODE
        distances = [node * RANKS_PER_NODE for node in range(REPLICAS + 1)]
        owners = [
            (first + distance + local) % self.world_size
            for distance in distances
            for local in range(RANKS_PER_NODE)
        ]
        windows = [
            HeldWindow(Window(WindowName(start, 'plan'), WINDOW), owner)
            for start in (newest - 2 * WINDOW, newest - WINDOW)
            for owner in owners
        ]
        return Report(
            survivor=True,
            node=_node(rank),
            process=10_000 + rank,
            windows=windows,
            origin=origin,
            committed=committed,
            clean_at=committed,
            first_logged=newest - 2 * WINDOW,
            address=(f'10.0.{rank // 256}.{rank % 256}', 20_000 + rank),
            details=b'plan and trainer' * 8,
        )


def replacement(rank: int) -> Report:
    return Report(survivor=False, node=_node(rank), process=10_000 + rank, windows=[])


def _node(rank: int) -> str:
    return f'node{rank // RANKS_PER_NODE}'
