# SPDX-License-Identifier: Apache-2.0
"""Builds the event that a process emits when it begins to capture."""

from msgspec import UNSET

from moevement_ext.capture.operators import Operators
from moevement_ext.config import MOEVEMENT, node_name
from moevement_ext.events import Protected
from moevement_ext.membership.rank import Rank
from moevement_ext.plan.strategy.cycle import Cycle
from moevement_ext.protect.planner import Planner
from moevement_ext.replicate.host_memory import HostMemory


def protected_event(
    rank: Rank,
    planner: Planner,
    operators: Operators,
    memory: HostMemory,
    replicas: int,
    cycle: Cycle,
) -> Protected:
    """The event with the rank's place in the job and its memory; see the event's fields.

    `replicas` is the number of reachable holders of the rank's windows.
    """
    return Protected(
        node=node_name(),
        stage=planner.place.stage,
        world_size=rank.world_size,
        copies=1 + len(planner.place.replicas),
        replicas=replicas,
        window=cycle.plan.window,
        host_memory=memory.by_kind(),
        operators={
            name: (held.full_bytes, held.weight_bytes) for name, held in operators.slices.items()
        },
        experts=[name for name, kind in operators.kinds.items() if kind == 'expert'],
        strategy=UNSET if rank.config.strategy == MOEVEMENT else rank.config.strategy,
        interval=cycle.interval,
    )
