# SPDX-License-Identifier: Apache-2.0
"""Host memory that a node will need, checked before iteration 1 (invariant I5)."""

import math
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from moevement_ext.errors import HostMemoryError
from moevement_ext.memory.cgroup import THIS_PROCESS, memory_left
from moevement_ext.memory.file_system import is_in_memory

GIB = 2**30

NO_SPACE_REMEDY = (
    'Remove what earlier runs left there, mount a larger tmpfs (mount -o remount,size=...), '
    'choose another --sparse-ckpt-dir, or lower --sparse-ckpt-replicas, --sparse-ckpt-window or '
    '--sparse-ckpt-log-lag.'
)
"""Remedy for a full file system of the windows."""

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


SPARES = 'MOEVEMENT_HOT_SPARES'
"""Environment variable of a worker: number of hot spares that its launcher keeps on its node."""
# Of one hot spare: 0.4 GiB after importing torch and Megatron on a CPU, plus a margin.
_SPARE_BYTES = 512 << 20


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
        """Refuse a plan that does not fit, before anything is allocated.

        Args:
            budget_gb: `--sparse-ckpt-host-memory-gb`, GiB for the whole node; None: no limit but
                the file system's.
            directory: of this run on this node. Space that files of these ranks already reserve in
                it (left by earlier processes, to be adopted) is not needed again.
            process: as for `memory_left`.

        Raises:
            HostMemoryError: the plan exceeds the budget, the free space of the file system, the
                memory limit of the container, or the memory that the machine has available.
        """
        if budget_gb is not None and self.node_total > budget_gb * GIB:
            raise HostMemoryError(
                f'{self.describe()} exceeds --sparse-ckpt-host-memory-gb {budget_gb:g}. '
                f'Raise it to at least {_gib_up(self.node_total)}, {_LESS}.'
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
        margin = sum(map(_margin, new))
        if missing > 0 and missing + margin * _is_shared(directory) > free:
            shared = margin and _is_shared(directory)
            others = f', and {gib(margin)} for what else lives in {SHARED},' if shared else ''
            raise HostMemoryError(
                f'{self.describe()}: {directory} needs {gib(missing)} more '
                f'({here}){others} but only {gib(free)} are free. '
                f'{NO_SPACE_REMEDY}'
            )
        spares = spare_bytes()  # they import the program once the workers have started
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
        """Bytes of kept, and of deleted, window files that an earlier start left with other sizes.

        Files without a committed window are deleted at once, the others once newer windows replace
        them.
        """
        kept = deleted = 0
        if self.sizes is not None:
            for rank in self.ranks:
                for path, status in _files_below(self._folder(directory, rank)):
                    if path.endswith('.window') and status.st_size not in self.sizes:
                        whole = os.path.basename(path).startswith('window-')
                        kept += whole * status.st_blocks * 512
                        deleted += (not whole) * status.st_blocks * 512
        return kept, deleted


def gib(nbytes: int) -> str:
    """Format a size in bytes, e.g. `1.50 GiB`."""
    return f'{nbytes / GIB:.2f} GiB' if abs(nbytes) >= GIB // 100 else f'{nbytes} bytes'


def _gib_up(nbytes: int) -> str:
    return f'{math.ceil(nbytes * 1000 / GIB) / 1000:.3f}'


def free_bytes(directory: Path) -> int:
    """Free bytes of the file system of `directory`, which need not exist yet."""
    return shutil.disk_usage(_existing(directory)).free


def file_system_of(directory: Path) -> str:
    """File system of `directory`, which need not exist yet; unique among those of a host."""
    return str(os.stat(_existing(directory)).st_dev)


def _existing(directory: Path) -> Path:
    while not directory.exists():
        directory = directory.parent
    return directory


def spare_bytes() -> int:
    """Memory of all hot spares of this node, in bytes; 0 under launchers that keep none."""
    return int(os.environ.get(SPARES, '0')) * _SPARE_BYTES


def _margin(nbytes: int) -> int:
    return max(MARGIN_BYTES, nbytes // MARGIN_SHARE)


def _is_shared(directory: Path) -> bool:
    """True if `directory` is in the file system that other libraries use, too."""
    try:
        return os.stat(_existing(directory)).st_dev == os.stat(SHARED).st_dev
    except OSError:
        return False


def reserved_bytes(directory: Path) -> int:
    """Bytes that files below `directory` occupy now (0 without such a directory)."""
    return sum(status.st_blocks * 512 for _, status in _files_below(directory))


def _files_below(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            with suppress(OSError):  # another rank is recycling it, or it belongs to another user
                yield path, os.stat(path)
