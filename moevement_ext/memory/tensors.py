# SPDX-License-Identifier: Apache-2.0
"""Tensors in headers and copies: element types by name, and batches with a limit on their bytes.

A batch is copied by one call, which releases the GIL once, not once per tensor. torch's optimizers
use `torch._foreach_copy_`, which has no public name (checked with torch 2.11 and 2.15); without it
this import fails, so no job starts.
"""

from collections.abc import Callable, Iterable, Iterator

import torch

# A fixed list, not attributes of torch: names come from files and from the wire.
_DTYPES = {
    str(dtype).removeprefix('torch.'): dtype
    for dtype in (
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.bool),
        *(torch.complex64, torch.complex128),
        *(torch.uint16, torch.uint32, torch.uint64),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
}

Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]
_foreach_copy = torch._foreach_copy_


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix('torch.')


def dtype_of(name: str) -> torch.dtype | None:
    return _DTYPES.get(name)


def copy_all(targets: Tensors, sources: Tensors, non_blocking: bool = False) -> None:
    """Copy each source into the target with the same index and shape, on the current stream.

    A target of another shape raises `RuntimeError`; the targets before it are copied.
    """
    if sources:
        _foreach_copy(targets, sources, non_blocking)


def in_batches[T](items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Group consecutive items into batches of at most `limit` bytes, in order; none is larger."""
    batch: list[T] = []
    total = 0
    for item in items:
        if batch and total + nbytes(item) > limit:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += nbytes(item)
    if batch:
        yield batch
