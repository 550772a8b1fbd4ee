# SPDX-License-Identifier: Apache-2.0
"""The training state of a MoE stage on one device, and compute that takes about a given time."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moevement_ext.capture.layout import OperatorSlices, TensorSlice

_FULL_PARTS = ('master', 'exp_avg', 'exp_avg_sq')
_BYTES_PER_ELEMENT = 14  # three of float32, one of bfloat16


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    state_bytes: int
    """Size of the training state, about."""
    hidden: int
    """Matrices of an expert are (ffn, hidden)."""
    ffn: int
    matmul: int
    """Compute is products of square matrices of this size."""
    iteration_s: float
    """Compute time of an iteration, about."""
    repeats: int
    """Windows with capture, and as many iterations without."""
    copies: int = 10
    """Large copies by which the limit is measured."""
    small_calls: int = 2000
    """Small copies, and launches, with nothing else to do."""


class State:
    """The training state of experts on one device, and what is captured of each.

    Args:
        device: where it lives.
        settings: sizes; at least two experts are made.
    """

    def __init__(self, device: torch.device, settings: Settings) -> None:
        shape = (settings.ffn, settings.hidden)
        per_expert = 3 * shape[0] * shape[1] * _BYTES_PER_ELEMENT  # gate, up and down projection
        self.tensors: list[torch.Tensor] = []
        self.operators: dict[str, OperatorSlices] = {}
        for index in range(max(2, settings.state_bytes // per_expert)):
            name = f'expert.{index}'
            self.operators[name] = self._expert(name, shape, device)

    def _expert(self, name: str, shape: tuple[int, int], device: torch.device) -> OperatorSlices:
        def part(matrix: str, kind: str, dtype: torch.dtype) -> TensorSlice:
            flat = torch.full((shape[0] * shape[1],), 1.0, dtype=dtype, device=device)
            self.tensors.append(flat)
            return TensorSlice(name, f'{name}.{matrix}', kind, 0, flat.numel(), flat)

        matrices = ('gate', 'up', 'down')
        full = [part(matrix, kind, torch.float32) for matrix in matrices for kind in _FULL_PARTS]
        light = [part(matrix, 'weight', torch.bfloat16) for matrix in matrices]
        return OperatorSlices(tuple(full), tuple(light))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors)

    def set(self, value: int) -> None:
        """Overwrite everything, as an update does; small integers are exact in bfloat16."""
        torch._foreach_zero_(self.tensors)
        torch._foreach_add_(self.tensors, float(value))


class Compute:
    """Matrix products that take about a given time."""

    def __init__(self, device: torch.device, settings: Settings) -> None:
        size = settings.matmul
        self._a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        self._b = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        self._product = torch.empty_like(self._a)
        self._count = 1
        self()
        seconds = statistics.median(timed(device, self) for _ in range(5))
        self._count = max(1, round(settings.iteration_s / seconds))

    def __call__(self) -> None:
        """Queue one iteration."""
        for _ in range(self._count):
            torch.mm(self._a, self._b, out=self._product)


def timed(device: torch.device, work: Callable[[], None]) -> float:
    """Seconds from an idle device until `work` and all it queued is done."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait until all that was queued on the device is done."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
