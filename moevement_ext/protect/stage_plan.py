# SPDX-License-Identifier: Apache-2.0
"""What a stage captures when: planned by its first rank, and handed out to the others.

They find it in the launcher's store, so that nobody else reads the shares of all experts of the
model, or computes what a thousand ranks would compute alike.
"""

from datetime import timedelta

import msgspec
from torch.distributed import DistStoreError, Store

from moevement_ext.membership import packing
from moevement_ext.plan.byte_planner import WindowPlan
from moevement_ext.plan.replanning import PlanParameters
from moevement_ext.protect.checkpointer import ScheduledPlan

VERSIONS_KEPT = 4
"""In the store; the one in force is the newest or the one before."""
# For the first rank of the stage; if it is lost, its replacement hands the plan out.
_LONGEST_WAIT = timedelta(seconds=5)


class StagePlan(msgspec.Struct, frozen=True):
    """A plan of one stage."""

    version: int
    origin: int
    plan: WindowPlan
    digest: str
    """Stands for all that the plans of all stages are computed from."""
    shares: dict[str, float]
    """Share of the tokens of its layer, by expert operator of the stage."""

    def schedule(self) -> ScheduledPlan:
        """What windows are captured by."""
        return ScheduledPlan(self.origin, self.plan, self.digest, self.version)

    def packed(self) -> bytes:
        """Compressed, as names of operators repeat."""
        return packing.packed(msgspec.msgpack.encode(self))

    @classmethod
    def unpacked(cls, packed: bytes) -> 'StagePlan':
        """What was packed."""
        return msgspec.msgpack.decode(packing.unpacked(packed), type=cls)


def publish(store: Store, parameters: PlanParameters) -> None:
    """What the plans of all stages are computed from, for the first rank of each."""
    packed = packing.packed(msgspec.msgpack.encode(parameters))
    store.set(_parameters_key(parameters.version), packed)  # type: ignore[arg-type]
    store.delete_key(_parameters_key(parameters.version - VERSIONS_KEPT))


def published(store: Store, version: int) -> PlanParameters:
    """The same, by the version; waits for it as long as the store does."""
    packed = packing.unpacked(store.get(_parameters_key(version)))
    return msgspec.msgpack.decode(packed, type=PlanParameters)


def hand_out(store: Store, stage: int, plan: StagePlan) -> None:
    """Leave the plan for the other ranks of the stage, which ask no more for the oldest."""
    store.set(_plan_key(plan.version, stage), plan.packed())  # type: ignore[arg-type]
    store.delete_key(_plan_key(plan.version - VERSIONS_KEPT, stage))


def handed_out(store: Store, stage: int, version: int) -> StagePlan | None:
    """The plan of the stage; None if its first rank leaves none for some seconds."""
    key = _plan_key(version, stage)
    try:
        store.wait([key], _LONGEST_WAIT)
    except DistStoreError:
        if not store.check([key]):  # raises where the connection is lost
            return None
    return StagePlan.unpacked(store.get(key))


def _parameters_key(version: int) -> str:
    return f'plan/{version}'


def _plan_key(version: int, stage: int) -> str:
    return f'plan/{version}/{stage}'
