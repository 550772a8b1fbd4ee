# SPDX-License-Identifier: Apache-2.0
"""Capture plan of a stage, made by its first rank and handed out to the others.

The other ranks read the plan from the launcher's store. They neither read the shares of all experts
of the model nor repeat the same computation on a thousand ranks.
"""

from collections.abc import Collection
from datetime import timedelta

import msgspec
from torch.distributed import DistStoreError, Store

from moevement_ext.events import Replanned
from moevement_ext.membership import packing
from moevement_ext.plan.byte_planner import WindowPlan
from moevement_ext.plan.replanning import PlanParameters
from moevement_ext.plan.strategy.cycle import Cycle

VERSIONS_KEPT = 4
"""Plans kept in the store; the plan in force is the newest or the previous one."""
# Wait for the stage's first rank; if it is lost, its replacement hands the plan out.
_LONGEST_WAIT = timedelta(seconds=5)


_PARAMETERS = msgspec.msgpack.Decoder(PlanParameters)


class StagePlan(msgspec.Struct, frozen=True):
    """A plan of one stage."""

    version: int
    origin: int
    plan: WindowPlan
    digest: str
    shares: dict[str, float]
    """Share of the layer's tokens, by expert operator of the stage."""
    idle: int = 0
    experts: int = 0
    lost: float = 0.0

    def schedule(self) -> Cycle:
        plan = (self.origin, self.plan, self.digest, self.version, self.idle)
        return Cycle(*plan, self.experts, self.shares, self.lost)

    def event(self, operators: Collection[str]) -> Replanned:
        return Replanned(
            origin=self.origin,
            window=self.plan.window,
            version=self.version,
            shares={name: share for name, share in self.shares.items() if name in operators},
            interval=self.schedule().interval,
        )

    def packed(self) -> bytes:
        """Encode and compress the plan, as operator names repeat."""
        return packing.packed(msgspec.msgpack.encode(self))

    @classmethod
    def unpacked(cls, packed: bytes) -> 'StagePlan':
        """Inverse of `packed`."""
        return _PLAN.decode(packing.unpacked(packed))


_PLAN = msgspec.msgpack.Decoder(StagePlan)


def publish(store: Store, parameters: PlanParameters) -> None:
    """Publish the inputs of all stages' plans, for the first rank of each stage."""
    packed = packing.packed(msgspec.msgpack.encode(parameters))
    store.set(_parameters_key(parameters.version), packed)  # type: ignore[arg-type]
    store.delete_key(_parameters_key(parameters.version - VERSIONS_KEPT))


def published(store: Store, version: int) -> PlanParameters:
    """Read published inputs by version; waits up to the store's timeout."""
    packed = packing.unpacked(store.get(_parameters_key(version)))
    return _PARAMETERS.decode(packed)


def hand_out(store: Store, stage: int, plan: StagePlan) -> None:
    """Store the plan for the other ranks of the stage, and delete the oldest plan."""
    store.set(_plan_key(plan.version, stage), plan.packed())  # type: ignore[arg-type]
    store.delete_key(_plan_key(plan.version - VERSIONS_KEPT, stage))


def handed_out(store: Store, stage: int, version: int) -> StagePlan | None:
    """Read the plan of the stage; None if its first rank does not hand one out within seconds."""
    key = _plan_key(version, stage)
    try:
        store.wait([key], _LONGEST_WAIT)
    except DistStoreError:
        if not store.check([key]):  # raises if the connection is lost
            return None
    return StagePlan.unpacked(store.get(key))


def _parameters_key(version: int) -> str:
    return f'plan/{version}'


def _plan_key(version: int, stage: int) -> str:
    return f'plan/{version}/{stage}'
