# SPDX-License-Identifier: Apache-2.0
"""The last window of a job that ends as planned: one slot with all of the state.

The next start, of whatever layout, goes on from there: nothing is computed again, and a window of
several iterations is not converted. Training thread.
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

# For the others, besides the time that the bytes take.
_WAIT_S = 10.0


def part(
    protection: Protection, rank: Rank, operators: Operators, iteration: int, state: bytes
) -> bool:
    """Keep the state after `iteration`; all ranks do so, at the same iteration.

    Args:
        protection: started, and not in a recovery.
        rank: this rank.
        operators: of this rank.
        iteration: number of committed iterations.
        state: auxiliary state after them.

    Returns:
        True if all ranks and the holders of their replicas have it, with `--sparse-ckpt-disk` all
        disks, too.

    Raises:
        HostMemoryError: there is no room for it.
    """
    protection.stop_capturing()
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
