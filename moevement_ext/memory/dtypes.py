# SPDX-License-Identifier: Apache-2.0
"""Element types by their names in headers."""

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


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix('torch.')


def dtype_of(name: str) -> torch.dtype | None:
    return _DTYPES.get(name)
