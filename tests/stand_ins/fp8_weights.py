# SPDX-License-Identifier: Apache-2.0
"""Weights in fp8 with the parts of Transformer Engine's tensors that Megatron uses, on the CPU.

A forward pass computes with the bytes, the gradient of what went in with a transposed copy of them,
which is made anew when the weights have been gathered. `tests/gpu/test_stand_ins.py` compares the
names and the rules with the real ones.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from megatron.core import fp8_utils
from megatron.core.distributed import distributed_data_parallel

from tests.stand_ins.float8 import LARGEST, Float8Quantizer

BLOCK = 16
"""Rows and columns that share a scale; 128 in Transformer Engine."""


class QuantizedWeight(torch.Tensor):
    """Looks like a bf16 matrix; a reader of it gets the values of its bytes.

    Args:
        bytes_: uint8, [rows, columns].
        scale_inv: fp32, one element for each block; the bytes are multiplied by it.
    """

    NAMES: ClassVar[tuple[str, str, str]]
    """Of the bytes, their scales, and the transposed bytes."""

    @staticmethod
    def __new__(cls, bytes_: torch.Tensor, scale_inv: torch.Tensor) -> Self:
        made = torch.Tensor._make_wrapper_subclass(
            cls, bytes_.shape, dtype=torch.bfloat16, device=bytes_.device
        )
        made.hold(bytes_, scale_inv, None)
        return made

    def hold(
        self, bytes_: torch.Tensor, scale_inv: torch.Tensor, transposed: torch.Tensor | None
    ) -> None:
        for name, held in zip(self.NAMES, (bytes_, scale_inv, transposed), strict=True):
            setattr(self, name, held)

    def held(self) -> list[Any]:
        return [getattr(self, name) for name in self.NAMES]

    def of(
        self, bytes_: torch.Tensor, scale_inv: torch.Tensor, transposed: torch.Tensor | None
    ) -> Self:
        """Another look at the same weight, or at a part of it."""
        made = type(self)(bytes_, scale_inv)
        made.hold(bytes_, scale_inv, transposed)
        return made

    @classmethod
    def largest_values(cls, matrix: torch.Tensor) -> torch.Tensor:
        """The largest value of each block of a matrix, in the shape of the scales."""
        raise NotImplementedError

    @classmethod
    def spread(cls, scales: torch.Tensor) -> torch.Tensor:
        """A scale for each element, or one that fits all."""
        raise NotImplementedError

    @classmethod
    def rounded(cls, matrix: torch.Tensor) -> Self:
        """What a layer makes of its first values."""
        scale_inv = cls.largest_values(matrix.detach().float()) / LARGEST
        return cls(_bytes(matrix.detach().float() / cls.spread(scale_inv)), scale_inv)

    def quantize_(self, source: torch.Tensor) -> Self:
        """Round other values into it, in place."""
        made = self.rounded(source).held()
        for own, new in zip(self.held()[:2], made[:2], strict=True):
            own.copy_(new)
        return self

    def dequantize(self) -> torch.Tensor:
        return self.float().bfloat16()

    def float(self, *_: Any, **__: Any) -> torch.Tensor:
        bytes_, scale_inv, _ = self.held()
        return _values(bytes_, self.spread(scale_inv))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A dense checkpoint holds what it stands for."""
        return self.dequantize().__reduce_ex__(protocol)

    def of_transposed(self) -> torch.Tensor:
        """bf16, by the transposed bytes as they were when the weights were gathered last."""
        if self.held()[2] is None:
            self.transpose_bytes()
        _, scale_inv, transposed = self.held()
        return _values(transposed.t(), self.spread(scale_inv)).bfloat16()

    def transpose_bytes(self) -> None:
        setattr(self, self.NAMES[2], self.held()[0].t().contiguous())

    def __repr__(self, **_: Any) -> str:
        return f'{type(self).__name__}(shape={tuple(self.shape)})'

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0]
        if func is torch.ops.aten.detach.default:
            return first.of(*first.held())
        if func in _VIEWS and isinstance(first, Float8Tensor):
            bytes_, scale_inv, _ = first.held()
            return first.of(func(bytes_, *args[1:], **(kwargs or {})), scale_inv, None)
        if func is torch.ops.aten.copy_.default and isinstance(first, QuantizedWeight):
            return first.quantize_(args[1])
        plain = [one.dequantize() if isinstance(one, QuantizedWeight) else one for one in args]
        return func(*plain, **(kwargs or {}))


class Float8Tensor(QuantizedWeight):
    """One scale, fp32 [1], for all of it.

    With delayed scaling it is rounded by a quantizer that looks into the state of its module: the
    scale that is there, and where the largest value of the present is noted.
    """

    NAMES = ('_data', '_scale_inv', '_transpose')
    _quantizer: Float8Quantizer | None = None

    @classmethod
    def by(cls, matrix: torch.Tensor, quantizer: Float8Quantizer) -> Self:
        """What a layer with delayed scaling makes of its first values."""
        made = cls(torch.empty_like(matrix, dtype=torch.uint8), torch.empty(1))
        made._quantizer = quantizer
        return made.quantize_(matrix)

    def of(
        self, bytes_: torch.Tensor, scale_inv: torch.Tensor, transposed: torch.Tensor | None
    ) -> Self:
        made = super().of(bytes_, scale_inv, transposed)
        made._quantizer = self._quantizer
        return made

    def quantize_(self, source: torch.Tensor) -> Self:
        if self._quantizer is None:
            return super().quantize_(source)
        self._quantizer.update_quantized(source, *self.held()[:2])
        return self

    @classmethod
    def largest_values(cls, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.abs().max().view(1)

    @classmethod
    def spread(cls, scales: torch.Tensor) -> torch.Tensor:
        return scales


class Float8BlockwiseQTensor(QuantizedWeight):
    """A scale for each block, fp32 [rows / BLOCK, columns / BLOCK]."""

    NAMES = ('_rowwise_data', '_rowwise_scale_inv', '_columnwise_data')

    @classmethod
    def largest_values(cls, matrix: torch.Tensor) -> torch.Tensor:
        rows, columns = matrix.shape
        blocks = matrix.abs().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        return blocks.amax(dim=(1, 3))

    @classmethod
    def spread(cls, scales: torch.Tensor) -> torch.Tensor:
        return scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.slice.Tensor)
KINDS = {'tensorwise': Float8Tensor, 'blockwise': Float8BlockwiseQTensor}
"""By recipe, of those that scale by what they are about to round."""


def _bytes(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def _values(bytes_: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    return bytes_.contiguous().view(torch.float8_e4m3fn).float() * scale_inv


class Product(torch.autograd.Function):
    """`tokens @ weight.T` in bf16."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight = weight
        return tokens @ weight.dequantize().t()

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        (tokens,) = ctx.saved_tensors
        of_tokens = gradient @ ctx.weight.of_transposed()
        if not ctx.needs_input_grad[1]:
            return of_tokens, None
        flat = gradient.flatten(0, -2)
        return of_tokens, flat.t() @ tokens.flatten(0, -2)


def in_fp8(
    weight: torch.nn.Parameter, recipe: str, quantizer: Float8Quantizer | None = None
) -> torch.nn.Parameter:
    """The weight of a layer that keeps it in fp8, with what else upstream has noted about it.

    Args:
        weight: as the layer has made it.
        recipe: `delayed`, or one of `KINDS`.
        quantizer: of delayed scaling.
    """
    if quantizer is not None:
        made = torch.nn.Parameter(Float8Tensor.by(weight.detach(), quantizer))
    else:
        made = torch.nn.Parameter(KINDS[recipe].rounded(weight))
    for name, value in vars(weight).items():
        setattr(made, name, value)
    return made


def delayed_weight(values: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor) -> Float8Tensor:
    """A weight that is rounded by a scale of its module, where the largest value is noted."""
    return Float8Tensor.by(values, Float8Quantizer(scale, amax))


def replace_raw_data(weight: QuantizedWeight, bytes_: torch.Tensor) -> None:
    """The bytes go on in a buffer of upstream's."""
    bytes_.detach().copy_(weight.held()[0])
    setattr(weight, weight.NAMES[0], bytes_)


@torch.no_grad()
def cast_master_weights_to_fp8(
    weights: Sequence[QuantizedWeight],
    masters: Sequence[torch.Tensor | None],
    starts: Sequence[int | None],
    group: torch.distributed.ProcessGroup,
    *_: Any,
) -> None:
    """Round the shards of this rank, all with scales that fit those of the whole group.

    Args:
        weights: all of the group, in the same order on every rank.
        masters: fp32 shards; None of weights that this rank has no shard of.
        starts: element at which a shard begins in its weight.
        group: the ranks that have a shard each.
    """
    if not weights:
        return
    if getattr(weights[0], '_quantizer', None) is not None:
        _cast_by_quantizers(weights, masters, starts, group)
        return
    matrices = []
    for weight, master, start in zip(weights, masters, starts, strict=True):
        matrix = torch.zeros(weight.numel())
        if master is not None and start is not None:
            matrix[start : start + master.numel()] = master.bfloat16().float()
        matrices.append(matrix.view(weight.shape))
    largest = [type(one).largest_values(own) for one, own in zip(weights, matrices, strict=True)]
    packed = torch.cat([values.flatten() for values in largest])
    torch.distributed.all_reduce(packed, torch.distributed.ReduceOp.MAX, group=group)
    reduced = packed.split([values.numel() for values in largest])
    for weight, matrix, master, start, values in zip(
        weights, matrices, masters, starts, reduced, strict=True
    ):
        bytes_, scale_inv, _ = weight.held()
        scale_inv.copy_((values / LARGEST).view(scale_inv.shape))
        if master is not None and start is not None:
            part = slice(start, start + master.numel())
            scaled = (matrix / weight.spread(scale_inv)).flatten()[part]
            bytes_.view(-1)[part] = _bytes(scaled)


def _cast_by_quantizers(
    weights: Sequence[QuantizedWeight],
    masters: Sequence[torch.Tensor | None],
    starts: Sequence[int | None],
    group: torch.distributed.ProcessGroup,
) -> None:
    """Delayed scaling: the largest values go into the state of the modules, for the next scales."""
    for weight, master, start in zip(weights, masters, starts, strict=True):
        if master is not None and start is not None:
            part = weight.detach().view(-1)[start : start + master.numel()]
            part.quantize_(master.bfloat16())
    quantizers = [weight._quantizer for weight in weights]
    amax = torch.cat([quantizer.amax for quantizer in quantizers])
    torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=group)
    for weight, quantizer, largest in zip(weights, quantizers, amax.split(1), strict=True):
        quantizer.amax.copy_(largest)
        weight._scale_inv.copy_(quantizer.scale.reciprocal())


def post_all_gather_processing(weights: Sequence[QuantizedWeight]) -> None:
    """All bytes are there; those that gradients are computed with follow."""
    for weight in weights:
        weight.transpose_bytes()


def install() -> None:
    """Upstream takes these for Transformer Engine's."""
    fp8_utils.HAVE_TE_FP8_TENSOR_CLASS = True
    fp8_utils.FP8_TENSOR_CLASS = QuantizedWeight
    fp8_utils.is_te_min_version = lambda *_: True
    fp8_utils._modify_underlying_storage_impl = replace_raw_data
    fp8_utils._quantize_param_shard_impl = cast_master_weights_to_fp8
    fp8_utils.te_post_all_gather_processing = post_all_gather_processing
    together = distributed_data_parallel.partition_buckets

    def apart(buffers: Sequence[Any], **settings: Any) -> list[Any]:
        """Gloo would gather bytes and bf16 in one call, and convert the ones to the others."""
        return [group for buffer in buffers for group in together([buffer], **settings)]

    distributed_data_parallel.partition_buckets = apart
