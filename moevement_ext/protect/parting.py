# SPDX-License-Identifier: Apache-2.0
"""Captures the last window of a job that ends as planned: one slot with the whole state.

The next start, in any layout, continues from it without replaying iterations or converting a window
of several slots. Training thread.
"""

import msgspec
import xxhash

from moevement_ext.capture.layout import SlotLayout
from moevement_ext.capture.operators import Operators
from moevement_ext.errors import HostMemoryError
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import window_capacity
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import WindowName
from moevement_ext.memory.window.settings import encode
from moevement_ext.memory.window.slot import (
    FORMAT_VERSION,
    SlotContext,
    SlotHeader,
    frame_bytes_bound,
)
from moevement_ext.plan.byte_planner import WindowPlan
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
    name = WindowName(iteration, plan)
    layout = SlotLayout(WindowPlan((tuple(operators.slices),)), 0, operators.slices)
    header = SlotHeader(
        version=FORMAT_VERSION,
        run=rank.identity.run,
        topology=rank.identity.topology,
        owner=rank.number,
        start=iteration,
        window=1,
        slot=0,
        iteration=iteration,
        plan=plan,
        payload_bytes=layout.payload_bytes,
        records=layout.records,
        context=msgspec.msgpack.encode(SlotContext(list(layout.full), [], state)),
        settings=encode(rank.identity.settings),
        placed=rank.identity.placed,
    )
    file = _file(windows, name, header)
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


def _file(windows: OwnerWindows, name: WindowName, header: SlotHeader) -> WindowFile:
    """A free file, or one more: no window that is still being replicated is overwritten."""
    file = windows.begin(name)
    if file is None:
        needed = window_capacity([(header.payload_bytes, frame_bytes_bound(header))])
        file = windows.begin_larger(name, needed)
    return file
