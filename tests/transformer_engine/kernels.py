# SPDX-License-Identifier: Apache-2.0
"""Has Transformer Engine's own classes run on a machine without a GPU, where they would refuse.

Its modules ask whether there is a GPU when they are built. What they keep, and in which order they
go through it, is Python, which does not need one; the kernels do. Of these the product of a grouped
layer alone is computed here, by torch: what asks for it is the layer itself.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from megatron.moevement.seams import cpu_device

HOPPER = 9, 0
_PROPERTIES = SimpleNamespace(
    major=9, minor=0, multi_processor_count=1, total_memory=0, name='no device'
)


def device() -> str:
    return 'cpu' if cpu_device.needed() else 'cuda'


def claim_a_gpu() -> None:
    """For good; `cpu_device.install()` has sent what asks for it to the CPU."""
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.get_device_capability = lambda *_: HOPPER
    cuda.get_device_properties = lambda *_: _PROPERTIES


@contextmanager
def claimed_gpu() -> Iterator[None]:
    """The same within the context; where there is one, nothing happens."""
    if not cpu_device.needed():
        yield
        return
    cpu_device.install()
    with patch.multiple(
        torch.cuda,
        is_available=lambda: True,
        get_device_capability=lambda *_: HOPPER,
        get_device_properties=lambda *_: _PROPERTIES,
    ):
        yield


@contextmanager
def grouped_product() -> Iterator[None]:
    """Within it, grouped layers take tensors on the CPU, and multiply by torch."""
    from transformer_engine.pytorch.module import grouped_linear

    on_gpu = patch.object(torch.Tensor, 'is_cuda', property(lambda _: True), create=True)
    with on_gpu, patch.object(grouped_linear, 'general_grouped_gemm', _multiply):
        yield


@torch.no_grad()
def _multiply(
    first: Sequence[torch.Tensor],
    second: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    *_: Any,
    layout: str = 'TN',
    m_splits: Sequence[int] | None = None,
    single_output: bool = False,
    **__: Any,
) -> tuple[Any, list[torch.Tensor], None]:
    """Columns first: 'TN' is of tokens and weights, 'NN' of gradients and weights, 'NT' of both."""
    places = out[0].split(list(m_splits or ())) if single_output else out
    for one, other, place in zip(first, second, places, strict=True):
        rows = other.t() if layout[1] == 'T' else other
        columns = one.t() if layout[0] == 'T' else one
        place.copy_(rows @ columns)
    return (out[0] if single_output else out), [torch.empty(0) for _ in first], None
