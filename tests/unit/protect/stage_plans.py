# SPDX-License-Identifier: Apache-2.0
"""Plans for the tests of what becomes of them, made without a model."""

from torch.distributed import Store

from moevement_ext.plan.byte_planner import WindowPlan
from moevement_ext.plan.replanning import Cycle, PlanParameters
from moevement_ext.protect.replanner import published


def stage_plan(parameters: PlanParameters) -> Cycle:
    """As the first rank of the only stage makes it."""
    slots = WindowPlan(tuple((f'operator{slot}',) for slot in range(parameters.window)))
    return Cycle(
        origin=parameters.origin,
        plan=slots,
        digest='digest',
        version=parameters.version,
        shares=parameters.shares,
    )


def planned(version: int, store: Store) -> Cycle:
    return stage_plan(published(store, version))


FIRST = stage_plan(PlanParameters(window=2))
