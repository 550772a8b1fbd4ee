# SPDX-License-Identifier: Apache-2.0
"""Batches of tensors: copied by one call, with a limit on the bytes per batch.

One call releases the GIL once, not once per tensor. torch's optimizers use `torch._foreach_copy_`,
which has no public name (checked with torch 2.11 and 2.15); without it this import fails, so no job
starts.
"""

from collections.abc import Callable, Iterable, Iterator

import torch

Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]

_foreach_copy = torch._foreach_copy_


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
