# SPDX-License-Identifier: Apache-2.0
"""A tensor with the parts of Transformer Engine's Float8Tensor that its Adam uses, on the CPU."""

from typing import Any, Self

import torch

LARGEST = 448.0
"""Of the format e4m3."""


class Float8Quantizer:
    """Rounds by a scale that it is given, and notes the largest value that it has seen.

    Args:
        scale: by what a tensor is multiplied before it is rounded, fp32, one element.
        amax: raised to the largest value of what is rounded, in place; fp32 [1].
    """

    def __init__(self, scale: torch.Tensor, amax: torch.Tensor) -> None:
        self.scale, self.amax = scale, amax

    @classmethod
    def fresh(cls, device: torch.device) -> Self:
        return cls(torch.ones(1, device=device), torch.zeros(1, device=device))

    def update_quantized(
        self, source: torch.Tensor, bytes_: torch.Tensor, scale_inv: torch.Tensor
    ) -> None:
        """Round `source` into `bytes_`; what is not a number stays none."""
        values = source.detach().float()
        scaled = (values * self.scale).clamp(-LARGEST, LARGEST)
        bytes_.copy_(scaled.to(torch.float8_e4m3fn).view(torch.uint8))
        scale_inv.copy_(self.scale.reciprocal())
        self.amax.copy_(torch.maximum(self.amax, values.abs().max()))


class Float8Tensor(torch.Tensor):
    """Bytes `_data` in e4m3 and the fp32 [1] `_scale_inv` that they are multiplied by.

    It looks like an fp32 tensor of the same shape; a reader gets the product, and a
    copy into it is rounded anew by `_quantizer`, in place.
    """

    _data: torch.Tensor
    _scale_inv: torch.Tensor
    _quantizer: Float8Quantizer

    @staticmethod
    def __new__(
        cls, data: torch.Tensor, scale_inv: torch.Tensor, quantizer: Float8Quantizer
    ) -> Self:
        made = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=torch.float32, device=data.device
        )
        made._data, made._scale_inv, made._quantizer = data, scale_inv, quantizer
        return made

    @classmethod
    def zeros(cls, like: torch.Tensor) -> Self:
        """Zeros of the shape of another tensor, with a scale of 1."""
        data = torch.zeros_like(like, dtype=torch.uint8)
        quantizer = Float8Quantizer.fresh(like.device)
        return cls(data, torch.ones(1, device=like.device), quantizer)

    def quantize_(self, source: torch.Tensor) -> Self:
        """Round `source` by the quantizer's scale."""
        self._quantizer.update_quantized(source, self._data, self._scale_inv)
        return self

    def float(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._data.view(torch.float8_e4m3fn).float() * self._scale_inv

    def __repr__(self, **_: Any) -> str:
        return f'Float8Tensor(shape={tuple(self.shape)})'

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            own = args[0]
            return cls(own._data, own._scale_inv, own._quantizer)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            return args[0].quantize_(args[1])
        raise NotImplementedError(f'{func} of the stand-in of Float8Tensor')
