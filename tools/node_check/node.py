# SPDX-License-Identifier: Apache-2.0
"""Resources of a node for windows: memory, and the rates of copies and sends."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from moevement_ext.memory.cgroup import memory_left
from moevement_ext.memory.file_system import is_in_memory

_REPEATS = 5


def memory(directory: Path) -> tuple[int, bool]:
    """Bytes that are free for windows, and whether the file system is in memory."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    free, left = shutil.disk_usage(there).free, memory_left()
    in_memory = is_in_memory(there)
    return free if left is None or not in_memory else min(free, left.nbytes), in_memory


class Meter:
    """Measures rates on one rank, with all ranks at once, as windows will use the links.

    Args:
        device: device of this rank.
        size: bytes of each transfer.
        nodes: node of each rank, by rank.
    """

    def __init__(self, device: torch.device, size: int, nodes: list[str]) -> None:
        self._device = device
        self._nodes = nodes
        self._rank = dist.get_rank()
        self._tensor = torch.ones(size, dtype=torch.uint8, device=device)

    def copy(self) -> float:
        """GB/s to host memory; all ranks at once."""
        gpu = self._device.type == 'cuda'
        host = torch.empty_like(self._tensor, device='cpu', pin_memory=gpu)
        return self._rate(lambda: host.copy_(self._tensor, non_blocking=True))

    def neighbour(self) -> float | None:
        """GB/s from this rank to the same place on the next node; None with one node only."""
        places: dict[str, list[int]] = {}
        for rank, node in enumerate(self._nodes):
            places.setdefault(node, []).append(rank)
        if len(places) == 1:
            return None
        node = self._nodes[self._rank]
        order, place = list(places), places[node].index(self._rank)
        here = order.index(node)
        to, source = (places[order[(here + step) % len(order)]] for step in (1, -1))
        received = torch.empty_like(self._tensor)

        def exchange() -> None:
            operations = []
            if place < len(to):
                operations.append(dist.P2POp(dist.isend, self._tensor, to[place]))
            if place < len(source):
                operations.append(dist.P2POp(dist.irecv, received, source[place]))
            for work in dist.batch_isend_irecv(operations) if operations else []:
                work.wait()

        return self._rate(exchange)

    def _rate(self, act: Callable[[], object]) -> float:
        """GB/s, median of several transfers; the first ones, which connect, are dropped."""
        act()
        seconds = []
        for _ in range(_REPEATS):
            dist.barrier()
            self._settle()
            began = time.perf_counter()
            act()
            self._settle()
            seconds.append(time.perf_counter() - began)
        return self._tensor.numel() / 1e9 / sorted(seconds)[_REPEATS // 2]

    def _settle(self) -> None:
        if self._device.type == 'cuda':
            torch.cuda.synchronize()
