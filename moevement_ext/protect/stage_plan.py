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
from moevement_ext.membership import exchange
from moevement_ext.plan.replanning import PlanParameters
from moevement_ext.plan.strategy.cycle import Cycle

VERSIONS_KEPT = 4
"""Plans kept in the store; the plan in force is the newest or the previous one."""
# Wait for the stage's first rank; if it is lost, its replacement hands the plan out.
_LONGEST_WAIT = timedelta(seconds=5)


_PARAMETERS = msgspec.msgpack.Decoder(PlanParameters)
_PLAN = msgspec.msgpack.Decoder(Cycle)


def packed(plan: Cycle) -> bytes:
    """Encode and compress a plan, as operator names repeat."""
    return exchange.packed(msgspec.msgpack.encode(plan))


def unpacked(content: bytes) -> Cycle:
    """Inverse of `packed`."""
    return _PLAN.decode(exchange.unpacked(content))


def event(plan: Cycle, operators: Collection[str]) -> Replanned:
    """The event of a rank with these operators that adopts a plan."""
    shares = plan.shares or {}
    return Replanned(
        origin=plan.origin,
        window=plan.plan.window,
        version=plan.version,
        shares={name: share for name, share in shares.items() if name in operators},
        interval=plan.period,
    )


def publish(store: Store, parameters: PlanParameters) -> None:
    """Publish the inputs of all stages' plans, for the first rank of each stage."""
    content = exchange.packed(msgspec.msgpack.encode(parameters))
    store.set(_parameters_key(parameters.version), content)  # type: ignore[arg-type]
    store.delete_key(_parameters_key(parameters.version - VERSIONS_KEPT))


def published(store: Store, version: int) -> PlanParameters:
    """Read published inputs by version; waits up to the store's timeout."""
    content = exchange.unpacked(store.get(_parameters_key(version)))
    return _PARAMETERS.decode(content)


def hand_out(store: Store, stage: int, plan: Cycle) -> None:
    """Store the plan for the other ranks of the stage, and delete the oldest plan."""
    store.set(_plan_key(plan.version, stage), packed(plan))  # type: ignore[arg-type]
    store.delete_key(_plan_key(plan.version - VERSIONS_KEPT, stage))


def handed_out(store: Store, stage: int, version: int) -> Cycle | None:
    """Read the plan of the stage; None if its first rank does not hand one out within seconds."""
    key = _plan_key(version, stage)
    try:
        store.wait([key], _LONGEST_WAIT)
    except DistStoreError:
        if not store.check([key]):  # raises if the connection is lost
            return None
    return unpacked(store.get(key))


def _parameters_key(version: int) -> str:
    return f'plan/{version}'


def _plan_key(version: int, stage: int) -> str:
    return f'plan/{version}/{stage}'
