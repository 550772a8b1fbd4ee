# SPDX-License-Identifier: Apache-2.0
"""What travels with a slot besides tensors."""

import msgspec


class SlotContext(msgspec.Struct, frozen=True):
    """Which operators a slot holds, on every rank of the stage, and the small state.

    A rank may hold no bytes of an operator that its peers hold, so the records alone do not tell.
    """

    full: list[str]
    """Operators captured in full in this slot: active from here on."""
    light: list[str]
    """Operators captured as compute weights: still frozen."""
    state: bytes
    """Encoded RNG, scheduler, scaler and data position, opaque to the engine."""


def decode_context(encoded: bytes) -> SlotContext:
    """Decode the context of a verified slot header."""
    return msgspec.msgpack.decode(encoded, type=SlotContext)
