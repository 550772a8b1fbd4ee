# SPDX-License-Identifier: Apache-2.0
"""Bandwidths, as the training will use them: to host memory, to the next node, of all together."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

_GB = 1e9
_REPEATS = 5


class Meter:
    """Measures on one rank of a process group of all.

    Args:
        device: of this rank.
        size: bytes of each transfer.
        nodes: of each rank, by rank.
    """

    def __init__(self, device: torch.device, size: int, nodes: list[str]) -> None:
        self._device = device
        self._nodes = nodes
        self._rank = dist.get_rank()
        self._tensor = torch.ones(size // 4, dtype=torch.float32, device=device)
        self._size = self._tensor.numel() * 4

    def copy(self) -> float:
        """GB/s to host memory; all ranks at once."""
        host = torch.empty_like(self._tensor, device='cpu', pin_memory=self._on_gpu)
        return self._rate(lambda: host.copy_(self._tensor, non_blocking=True))

    def all_reduce(self) -> float:
        """GB/s of the tensor, whatever the algorithm sends."""
        return self._rate(lambda: dist.all_reduce(self._tensor, op=dist.ReduceOp.MAX))

    def neighbour(self) -> float | None:
        """GB/s from this rank to the same place on the next node; None: there is one node only."""
        places = self._places()
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

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == 'cuda'

    def _places(self) -> dict[str, list[int]]:
        """Ranks of each node."""
        found: dict[str, list[int]] = {}
        for rank, node in enumerate(self._nodes):
            found.setdefault(node, []).append(rank)
        return found

    def _rate(self, act: Callable[[], object]) -> float:
        """GB/s in the median of some times; the first ones, which connect, do not count."""
        act()
        seconds = []
        for _ in range(_REPEATS):
            dist.barrier()
            self._settle()
            began = time.perf_counter()
            act()
            self._settle()
            seconds.append(time.perf_counter() - began)
        return self._size / _GB / sorted(seconds)[_REPEATS // 2]

    def _settle(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
