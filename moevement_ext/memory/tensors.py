# SPDX-License-Identifier: Apache-2.0
"""Tensors in headers, messages and copies: types by name, bytes, and batches of limited size.

A batch is copied by one call, which releases the GIL once, not once per tensor. torch's optimizers
use `torch._foreach_copy_`, which has no public name (checked with torch 2.11 and 2.15); without it
this import fails, so no job starts.
"""

from collections.abc import Callable, Iterable, Iterator

import msgspec
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


_EXTENSION = 1
_PARTS = msgspec.msgpack.Decoder(tuple[str, list[int], bytes])


def encoded(tensor: torch.Tensor) -> msgspec.msgpack.Ext:
    """A tensor of a known type in a message; an `enc_hook` of msgspec."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b''
    parts = dtype_name(tensor.dtype), list(tensor.shape), content
    return msgspec.msgpack.Ext(_EXTENSION, msgspec.msgpack.encode(parts))


def decoded(code: int, parts: memoryview) -> torch.Tensor:
    """Inverse of `encoded`, on the CPU; an `ext_hook` of msgspec."""
    name, shape, content = _PARTS.decode(parts)
    dtype = dtype_of(name)
    assert code == _EXTENSION and dtype is not None  # as `encoded` wrote it
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).view(shape)


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
