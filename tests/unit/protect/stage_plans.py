# SPDX-License-Identifier: Apache-2.0
"""Plans for the tests of what becomes of them, made without a model."""

from torch.distributed import Store

from moevement_ext.plan.byte_planner import WindowPlan
from moevement_ext.plan.replanning import PlanParameters
from moevement_ext.protect.stage_plan import StagePlan, published


def stage_plan(parameters: PlanParameters) -> StagePlan:
    """As the first rank of the only stage makes it."""
    slots = WindowPlan(tuple((f'operator{slot}',) for slot in range(parameters.window)))
    return StagePlan(parameters.version, parameters.origin, slots, 'digest', parameters.shares)


def planned(version: int, store: Store) -> StagePlan:
    """The same of one that was announced."""
    return stage_plan(published(store, version))


FIRST = stage_plan(PlanParameters(0, 0, 2, {}))
