# SPDX-License-Identifier: Apache-2.0
"""Captures the last window of a job that ends as planned: one slot with the whole state.

The next start, in any layout, continues from it without replaying iterations or converting a window
of several slots. Training thread.
"""

import xxhash

from moevement_ext.capture.layout import Operators, SlotLayout
from moevement_ext.errors import HostMemoryError
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.window.format import window_capacity
from moevement_ext.memory.window.settings import encode
from moevement_ext.memory.window.slot import SlotContext, frame_bytes_bound
from moevement_ext.plan.byte_planner import WindowPlan
from moevement_ext.protect.checkpointer import slot_header
from moevement_ext.protect.protection import Protection
from moevement_ext.replicate.protocol import MIN_BYTES_PER_SECOND

# For the other ranks, in addition to the transfer time of the bytes.
_WAIT_S = 10.0


def part(
    protection: Protection, rank: Rank, operators: Operators, iteration: int, state: bytes
) -> bool:
    """Capture the state after `iteration`. All ranks call this at the same iteration.

    `protection` is started, and not in a recovery; `state` is the auxiliary state after
    `iteration`. True if all ranks and their replica holders have the window, and with
    `--sparse-ckpt-disk` all disks, too. Raises `HostMemoryError` without room for the window.
    """
    protection.checkpointer.stop_capturing()
    windows = protection.memory.windows
    plan = xxhash.xxh3_64_hexdigest(f'{rank.identity.topology} parts'.encode())
    name = protection.checkpointer.history.window(iteration, plan)
    layout = SlotLayout(WindowPlan((tuple(operators.slices),)), 0, operators.slices)
    context = SlotContext(list(layout.full), [], state)
    settings = encode(rank.identity.settings)
    header = slot_header(rank.identity, name, 0, layout, context, settings=settings)
    file = windows.begin(name)
    if file is None:  # one more: no window that is still being replicated is overwritten
        needed = window_capacity([(header.payload_bytes, frame_bytes_bound(header))])
        file = windows.begin_larger(name, needed)
    try:
        payload = file.reserve_slot(0, layout.payload_bytes)
        for volatile in (True, False):
            for piece in layout.copies(payload, volatile):
                for target, source in zip(piece.targets, piece.sources, strict=True):
                    target.copy_(source)
    except HostMemoryError:
        windows.abandon(file)
        raise
    protection.windows.sealed(file, header)
    wait_s = _WAIT_S + layout.payload_bytes / MIN_BYTES_PER_SECOND
    persisted = protection.windows.wait_until_persisted(name, wait_s)
    return persisted and protection.keep_last(name, wait_s)
