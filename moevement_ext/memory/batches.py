# SPDX-License-Identifier: Apache-2.0
"""Many tensors taken together: copied by one call, and not too many bytes at a time.

In one call Python gives up the GIL once and not per tensor. torch's optimizers are built on
`torch._foreach_copy_`, but it has no public name. Checked with torch 2.11 and 2.15; without it this
module cannot be imported, so no job starts.
"""

from collections.abc import Callable, Iterable, Iterator

import torch

Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]

_foreach_copy = torch._foreach_copy_


def copy_all(targets: Tensors, sources: Tensors, non_blocking: bool = False) -> None:
    """Copy each source into the target at its place, on the present stream.

    Args:
        targets: of the shapes of the sources; devices may differ.
        sources: may be none.
        non_blocking: as of `torch.Tensor.copy_`.

    Raises:
        RuntimeError: a target has another shape; those before it are copied.
    """
    if sources:
        _foreach_copy(targets, sources, non_blocking)


def in_batches[T](items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Put neighbours together, in their order.

    Args:
        items: none larger than `limit`.
        nbytes: size of an item in bytes.
        limit: of a batch, in bytes.
    """
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
