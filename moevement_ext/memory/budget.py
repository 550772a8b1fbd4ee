# SPDX-License-Identifier: Apache-2.0
"""Host memory of the ranks of a node: arithmetic shared by training and planning, and its check.

Checked before iteration 1 (invariant I5). All sizes are in bytes, per rank unless stated otherwise.
Needs no torch.
"""

import math
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from moevement_ext.errors import HostMemoryError
from moevement_ext.memory.file_system import (
    GIB,
    NO_SPACE_REMEDY,
    existing_parent,
    files_below,
    free_bytes,
    gib,
    is_in_memory,
    reserved_bytes,
)
from moevement_ext.memory.ledger import Ledger
from moevement_ext.memory.limits import SPARES, THIS_PROCESS, memory_left
from moevement_ext.memory.mapped_file import in_pages
from moevement_ext.memory.window.format import GENERATIONS, PREAMBLE_BYTES
from moevement_ext.memory.window.slot import align_up

# Flags are in the order of the bytes that they save.
_LESS = (
    'lower --sparse-ckpt-replicas, --sparse-ckpt-window or --sparse-ckpt-log-lag, or use fewer '
    'ranks per node (--nproc-per-node, --workers-per-node)'
)

_HIGHER_LIMIT = (
    'Raise the limit of the container (--mem of Slurm, resources.limits.memory of Kubernetes)'
)
_MORE_AVAILABLE = (
    'A larger tmpfs does not help: end other programs that use memory '
    '(MemAvailable in /proc/meminfo)'
)

SHARED = Path('/dev/shm')
"""Shared memory directory of communication libraries and data loaders."""
MARGIN_BYTES = 4 * 2**20
"""Least free space per rank for these libraries, if windows are in that file system, and least free
memory for processes that start later."""
MARGIN_SHARE = 64
"""The margin is at least the rank's reserved bytes divided by this number."""


# Of one hot spare: 0.4 GiB after importing torch and Megatron on a CPU, plus a margin.
_SPARE_BYTES = 512 << 20

LEDGER_RECORDS = 4096
BESIDE_BYTES = 64 * 1024
"""Further bytes of a rank in the tmpfs, such as its lock."""
SLOT_ROOM_BYTES = 128 * 1024
"""Room for the header of a slot, with the auxiliary state."""
# Bytes of payload per byte of further room, for tensor alignment and router buffers.
_PAYLOAD_PER_ROOM = 1024
_LENGTHS_TRIED = 64


class RankMemory(msgspec.Struct, frozen=True):
    """Bytes one rank keeps in host memory, by kind."""

    own_windows: int
    """All generations of the windows of this rank."""
    replicas: int
    """All generations of the windows it holds for other ranks."""
    ledger: int
    log_ring: int = 0
    beside: int = 0
    """Locks, and files shared at a rendezvous of all ranks."""

    @property
    def total(self) -> int:
        return sum(msgspec.structs.astuple(self))


class HostMemoryPlan:
    """Host memory of all ranks of one node; `ranks` maps each rank to its bytes.

    `sizes` are the sizes of this start's window files; None: sizes are not compared. `nodes` has
    the nodes of ranks whose node is another one, with memory in the same file system.
    """

    def __init__(
        self,
        ranks: Mapping[int, RankMemory],
        sizes: Collection[int] | None = None,
        nodes: Mapping[int, str] | None = None,
    ) -> None:
        self.ranks = dict(ranks)
        self.sizes = sizes
        self._nodes = nodes or {}

    def by_kind(self) -> dict[str, int]:
        kinds = RankMemory.__struct_fields__
        return {kind: sum(getattr(rank, kind) for rank in self.ranks.values()) for kind in kinds}

    @property
    def node_total(self) -> int:
        return sum(rank.total for rank in self.ranks.values())

    def describe(self) -> str:
        """One line for the log: the node's total, by kind, and the largest rank."""
        kinds = ', '.join(
            f'{kind.replace("_", " ")} {gib(size)}' for kind, size in self.by_kind().items()
        )
        largest = max((rank.total for rank in self.ranks.values()), default=0)
        others = ', '.join(sorted({f' and {node}' for node in self._nodes.values()}))
        return (
            f'host memory {gib(self.node_total)} on this node{others} ({kinds}); '
            f'{len(self.ranks)} ranks, largest {gib(largest)}'
        )

    def check(self, budget_gb: float | None, directory: Path, process: Path = THIS_PROCESS) -> None:
        """Refuse a plan that does not fit, with a `HostMemoryError`, before anything is allocated.

        `budget_gb` (`--sparse-ckpt-host-memory-gb`, None: no limit) is for the whole node. Further
        limits are the free space of the file system, the container's memory and the machine's.
        Space that files of these ranks already reserve in `directory`, of this run on this node, is
        not needed again. `process` as for `memory_left`.
        """
        if budget_gb is not None and self.node_total > budget_gb * GIB:
            enough = math.ceil(self.node_total * 1000 / GIB) / 1000
            raise HostMemoryError(
                f'{self.describe()} exceeds --sparse-ckpt-host-memory-gb {budget_gb:g}. '
                f'Raise it to at least {enough:.3f}, {_LESS}.'
            )
        # Bytes that another rank reserves meanwhile count twice, as free and as adopted.
        free = free_bytes(directory)
        left = memory_left(process) if is_in_memory(directory) else None
        reserved = {rank: reserved_bytes(self._folder(directory, rank)) for rank in self.ranks}
        kept, deleted = self._of_other_sizes(directory)
        free += deleted
        adopted = sum(reserved.values()) + reserved_bytes(directory / 'reserved') - kept - deleted
        # A rank with files from an earlier process needs no further space.
        beside = sum(self.ranks[rank].beside for rank, found in reserved.items() if found)
        # An earlier start may have written the secret of the job already.
        beside += min(reserved_bytes(directory / 'shared'), self.node_total - beside - adopted)
        missing = self.node_total - beside - adopted
        here = f'{gib(adopted)} already reserved there'
        here += f', and {gib(kept)} by windows of other lengths, to resume from' if kept else ''
        new = [self.ranks[rank].total for rank, found in reserved.items() if not found]
        margin = sum(max(MARGIN_BYTES, nbytes // MARGIN_SHARE) for nbytes in new)
        if missing > 0 and missing + margin * _is_shared(directory) > free:
            shared = margin and _is_shared(directory)
            others = f', and {gib(margin)} for what else lives in {SHARED},' if shared else ''
            raise HostMemoryError(
                f'{self.describe()}: {directory} needs {gib(missing)} more '
                f'({here}){others} but only {gib(free)} are free. '
                f'{NO_SPACE_REMEDY}'
            )
        # Hot spares, which some launchers keep, import the program once the workers have started.
        spares = int(os.environ.get(SPARES, '0')) * _SPARE_BYTES
        if left is not None and missing > 0 and missing + margin + spares > left.nbytes + deleted:
            others = f', and {gib(margin)} for processes that start later,' if margin else ''
            others += f' hot spares take {gib(spares)} (--spares 0: none),' if spares else ''
            limit, remedy = f'the memory limit of {left.cgroup}', _HIGHER_LIMIT
            if left.cgroup is None:
                limit, remedy = 'the memory of this machine', _MORE_AVAILABLE
            raise HostMemoryError(
                f'{self.describe()}: {directory} needs {gib(missing)} more '
                f'({here}){others} but {limit} leaves {gib(left.nbytes)}. {remedy}, {_LESS}.'
            )

    def _folder(self, directory: Path, rank: int) -> Path:
        return directory.with_name(self._nodes.get(rank, directory.name)) / str(rank)

    def _of_other_sizes(self, directory: Path) -> tuple[int, int]:
        """Bytes of window files that an earlier start left with other sizes, kept and deleted.

        Kept are committed windows, until newer ones replace them.
        """
        kept = deleted = 0
        if self.sizes is not None:
            for rank in self.ranks:
                for path, status in files_below(self._folder(directory, rank)):
                    if path.endswith('.window') and status.st_size not in self.sizes:
                        whole = os.path.basename(path).startswith('window-')
                        kept += whole * status.st_blocks * 512
                        deleted += (not whole) * status.st_blocks * 512
        return kept, deleted


def _is_shared(directory: Path) -> bool:
    """True if `directory` is in the file system that other libraries use, too."""
    try:
        return os.stat(existing_parent(directory)).st_dev == os.stat(SHARED).st_dev
    except OSError:
        return False


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


def log_ring_bytes(own: Logged, most: Logged, longest_window: int, lag: float) -> int:
    """Size of the ring of a rank's upstream log; 0 if it logs nothing.

    `own` are this rank's logged bytes. `lag` are iterations from the beginning of the copy of a
    window's last slot until the window is persisted; with 1 the log is never full, as no window
    begins before. They count in bytes of the rank that logs `most`: a stage at the end of the
    pipeline sends as fast as others while micro-batches fill the pipeline.

    A window that starts with the state after iteration s is replayed from the sends of s+1. Its
    last slot is the state after s+W-1, copied and persisted during iteration s+W. Until then a
    recovery starts from the previous window, hence from iteration s-W+1: that is 2W - 1 whole
    iterations, and the sends of iteration s+W.
    """
    if not own.iteration_bytes:
        return 0
    late = align_up(math.ceil(lag * most.iteration_bytes))
    # A record does not wrap: the unused end of the ring is smaller than the largest record.
    return (2 * longest_window - 1) * own.iteration_bytes + late + own.record_bytes


def memory_of_files(nbytes: int) -> RankMemory:
    """Host memory of a rank with window files and a log of so many bytes."""
    ledger = in_pages(Ledger.bytes_needed(LEDGER_RECORDS))
    return RankMemory(own_windows=nbytes, replicas=0, ledger=ledger, beside=BESIDE_BYTES)


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
