# SPDX-License-Identifier: Apache-2.0
"""Host memory that a job reserves: arithmetic shared by training and planning.

Needs no torch. All sizes are in bytes, per rank unless stated otherwise.
"""

import math
from collections.abc import Iterable

import msgspec

from moevement_ext.memory.budget import RankMemory
from moevement_ext.memory.ledger import Ledger
from moevement_ext.memory.mapped import in_pages
from moevement_ext.memory.window.format import PREAMBLE_BYTES
from moevement_ext.memory.window.slot import align_up

GENERATIONS = 2
"""Files for the windows of one owner: one for the newest persisted window, one for the window that
is captured or received. A file becomes free when its successor is persisted; until then no window
begins (see `protect.lifecycle`)."""

LEDGER_RECORDS = 4096

BESIDE_BYTES = 64 * 1024
"""Further bytes of a rank in the tmpfs, such as its lock."""

SLOT_ROOM_BYTES = 128 * 1024
"""Room for the header of a slot, with the auxiliary state."""
# Bytes of payload per byte of further room, for tensor alignment and router buffers.
_PAYLOAD_PER_ROOM = 1024


_LENGTHS_TRIED = 64


class Logged(msgspec.Struct, frozen=True):
    """Upper bounds of a rank's logged data in one iteration, as regions of the ring."""

    iteration_bytes: int
    """All records together; 0 without logging."""
    record_bytes: int
    """The largest record."""


NOTHING_LOGGED = Logged(0, 0)


def window_file_bytes(state_bytes: int, longest_window: int, needed_bytes: int = 0) -> int:
    """Size of a window file, at least `needed_bytes` (0: exact size of the content unknown).

    `state_bytes` is the weights and optimizer state in the largest window of W iterations, in
    any order of the operators (`byte_planner.window_bytes_bound`), without alignment.
    """
    room = align_up(state_bytes // _PAYLOAD_PER_ROOM) + longest_window * SLOT_ROOM_BYTES
    return max(PREAMBLE_BYTES + align_up(state_bytes) + room, needed_bytes)


def stub_file_bytes(state_bytes: int, longest_window: int, needed_bytes: int = 0) -> int:
    """Size of a file for stubs (see `window.twin`): a window file without the state."""
    room = window_file_bytes(state_bytes, longest_window) - align_up(state_bytes)
    return max(room, needed_bytes)


def window_lengths(longest_window: int) -> list[int]:
    """Candidate values of W, ascending: all up to the longest, or a selection of many."""
    step = -(-longest_window // _LENGTHS_TRIED)
    return sorted({1, *range(longest_window, 0, -step)})


def log_reach(longest_window: int) -> int:
    """Whole iterations that the log must hold, without the one in which a window is persisted.

    A window that starts with the state after iteration s is replayed from the sends of
    iteration s+1. Its last slot is the state after s+W-1, copied while iteration s+W runs, and
    it is persisted some time during that iteration. Until then a recovery starts from the
    previous window, hence from iteration s-W+1: that is 2W - 1 whole iterations, and the sends
    of iteration s+W.
    """
    return 2 * longest_window - 1


def log_ring_bytes(own: Logged, most: Logged, longest_window: int, lag: float) -> int:
    """Size of the ring of a rank's upstream log; 0 if it logs nothing.

    Args:
        own: logged bytes of this rank.
        most: logged bytes of the rank that logs most. The lag is counted in these bytes, since a
            stage at the end of the pipeline sends as fast as other stages while micro-batches fill
            the pipeline.
        longest_window: W, iterations.
        lag: iterations from the beginning of the copy of a window's last slot until the window is
            persisted. With 1 the log is never full: no window begins before then.
    """
    if not own.iteration_bytes:
        return 0
    late = align_up(math.ceil(lag * most.iteration_bytes))
    # A record does not wrap: the unused end of the ring is smaller than the largest record.
    return log_reach(longest_window) * own.iteration_bytes + late + own.record_bytes


def rank_memory(
    window_file: int, replica_files: Iterable[int], log_ring: int, disk: bool = False
) -> RankMemory:
    """Host memory of a rank.

    `replica_files` has the size of a window file for each rank whose replicas it holds, and of
    a stub file for each rank whose twin it is. With `disk`, a third file is held during a copy.
    """
    return RankMemory(
        own_windows=(GENERATIONS + disk) * in_pages(window_file),
        replicas=GENERATIONS * sum(map(in_pages, replica_files)),
        ledger=in_pages(Ledger.bytes_needed(LEDGER_RECORDS)),
        log_ring=in_pages(log_ring),
        beside=BESIDE_BYTES,
    )
