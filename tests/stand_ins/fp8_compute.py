# SPDX-License-Identifier: Apache-2.0
"""Linear layers that compute in fp8 by the rules of Transformer Engine, on the CPU.

What goes into a product, and the gradient of what comes out, is rounded to fp8 by a scale. With
delayed scaling that is worked out from the largest values of earlier passes, which each module
keeps in `fp8_meta`; with tensorwise scaling from the tensor itself. The products are those of torch
with what the bytes stand for. `tests/transformer_engine` and `tests/gpu/test_stand_ins.py` compare
the two.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import fp8_utils, parallel_state
from megatron.core.models import backends
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import transformer_block, transformer_config
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP

from tests.stand_ins import fp8_weights
from tests.stand_ins.float8 import Float8Quantizer

INPUT, WEIGHT = 0, 1
"""Columns of the forward state of a product; the third, of what comes out, is not used."""
OF_OUTPUT = 0
"""Column of the backward state; the second is of the gradient of what went in."""


class Format(NamedTuple):
    dtype: torch.dtype
    largest: float


E4M3 = Format(torch.float8_e4m3fn, 448.0)
E5M2 = Format(torch.float8_e5m2, 57344.0)


class Recipe(NamedTuple):
    """What upstream asks for by its flags."""

    delayed: bool
    backward: Format
    """Of gradients."""
    margin: int = 0
    amax_history_len: int = 1
    amax_compute_algo: str = 'most_recent'

    @classmethod
    def of(cls, config: Any) -> 'Recipe':
        assert config.fp8_recipe in ('delayed', 'tensorwise', 'blockwise')
        return cls(
            config.fp8_recipe == 'delayed',
            E5M2 if config.fp8 == 'hybrid' else E4M3,
            config.fp8_margin,
            config.fp8_amax_history_len,
            config.fp8_amax_compute_algo,
        )


class DelayedScaling:
    """`scale`, fp32 [tensors], and `amax_history`, fp32 [length, tensors], the present in row 0."""

    def __init__(self, recipe: Recipe, tensors: int, device: str = 'cpu') -> None:
        self.scale = torch.ones(tensors, device=device)
        self.amax_history = torch.zeros(recipe.amax_history_len, tensors, device=device)

    def quantizer(self, column: int) -> Float8Quantizer:
        """One that rounds by a scale of this state, and notes the largest value in row 0."""
        return Float8Quantizer(self.scale[column], self.amax_history[0, column : column + 1])

    def update(self, recipe: Recipe, largest: float) -> None:
        """The maxima of row 0 are those of all ranks now: new scales, and an empty row 0."""
        history = self.amax_history
        amax = history.max(0).values if recipe.amax_compute_algo == 'max' else history[0]
        scale = largest / amax / 2**recipe.margin
        scale = torch.where((amax > 0) & amax.isfinite(), scale, self.scale)
        self.scale.copy_(torch.where(scale.isinf(), torch.finfo(torch.float32).max, scale))
        if len(history) > 1:
            history.copy_(torch.roll(history, -1, 0))
        history[0].zero_()


class GlobalState:
    depth = 0
    recipe: Recipe | None = None
    group: torch.distributed.ProcessGroup | None = None
    weights: str | None = None
    """The recipe by which layers that are built now keep their weights."""
    first = False
    """No module has computed with gradients in the outermost context yet."""
    registered: dict[str, list[DelayedScaling]] = {'scaling_fwd': [], 'scaling_bwd': []}
    """By direction, in the order in which modules first computed in training."""

    @classmethod
    def take_first(cls) -> bool:
        was, cls.first = cls.first, False
        return was

    @classmethod
    def reduce_and_update(cls, direction: str) -> None:
        """The largest values of row 0 over the group, of all modules in one collective."""
        recipe, states = cls.recipe, cls.registered[direction]
        if not states:
            return
        assert recipe is not None
        amax = torch.cat([state.amax_history[0] for state in states])
        if cls.group is not None and cls.group.size() > 1:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=cls.group)
        largest = (E4M3 if direction == 'scaling_fwd' else recipe.backward).largest
        for state, now in zip(states, amax.split([len(s.scale) for s in states]), strict=True):
            state.amax_history[0].copy_(now)
            state.update(recipe, largest)


@contextmanager
def autocast(recipe: Recipe, group: torch.distributed.ProcessGroup | None) -> Iterator[None]:
    """Within it, layers compute in fp8. The outermost one updates what went forward at its end."""
    if GlobalState.depth == 0:
        GlobalState.first = True
    GlobalState.depth += 1
    before = (GlobalState.recipe, GlobalState.group)
    GlobalState.recipe, GlobalState.group = recipe, group
    try:
        yield
    finally:
        GlobalState.depth -= 1
        if GlobalState.depth == 0 and recipe.delayed and torch.is_grad_enabled():
            with torch.no_grad():
                GlobalState.reduce_and_update('scaling_fwd')
        if GlobalState.depth:
            GlobalState.recipe, GlobalState.group = before


@contextmanager
def weights_in_fp8(name: str, recipe: Recipe) -> Iterator[None]:
    """Within it, layers are built with weights in fp8."""
    before = GlobalState.recipe
    GlobalState.weights, GlobalState.recipe = name, recipe
    try:
        yield
    finally:
        GlobalState.weights, GlobalState.recipe = None, before


def rounded(
    tensor: torch.Tensor, kind: Format, state: DelayedScaling | None, column: int
) -> torch.Tensor:
    """What the bytes of a tensor stand for; with a state, by its scale, noting the largest value.

    Args:
        tensor: of any shape.
        kind: what to round to.
        state: of a module with delayed scaling.
        column: of the state.
    """
    if tensor.numel() == 0:  # an expert without tokens
        return tensor
    amax = tensor.detach().abs().max().float()
    if state is None:
        scale = torch.where(amax > 0, kind.largest / amax, 1.0)
    else:
        now = state.amax_history[0, column : column + 1]
        now.copy_(torch.maximum(now, amax))
        scale = state.scale[column].clone()
    bytes_ = (tensor.float() * scale).clamp(-kind.largest, kind.largest).to(kind.dtype)
    return (bytes_.float() / scale).to(tensor.dtype)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, state: DelayedScaling | None, column: int
    ) -> torch.Tensor:
        return rounded(tensor, E4M3, state, column)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient, None, None


class _RoundedGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, product: torch.Tensor, recipe: Recipe, state: DelayedScaling | None, first: bool
    ) -> torch.Tensor:
        ctx.recipe, ctx.state, ctx.first = recipe, state, first
        return product.view_as(product)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        gradient = rounded(gradient, ctx.recipe.backward, ctx.state, OF_OUTPUT)
        if ctx.first and ctx.recipe.delayed:  # the last of the stage to compute gradients
            GlobalState.reduce_and_update('scaling_bwd')
        return gradient, None, None, None


class InFp8:
    """A linear layer of upstream; in an `autocast` it computes in fp8.

    Built while `weights_in_fp8`, it also keeps its weight so.
    """

    training: bool
    weight: torch.nn.Parameter

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if GlobalState.weights is not None:
            self.init_fp8_metadata()
            state = getattr(self, 'fp8_meta', {}).get('scaling_fwd')
            quantizer = state.quantizer(WEIGHT) if state is not None else None
            self.weight = fp8_weights.in_fp8(self.weight, GlobalState.weights, quantizer)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """What the first pass does; needs an `autocast`, or weights that are built in fp8."""
        recipe = GlobalState.recipe
        assert (GlobalState.depth or GlobalState.weights) and recipe is not None
        if recipe.delayed and not hasattr(self, 'fp8_meta'):
            self.fp8_meta = {
                'scaling_fwd': DelayedScaling(recipe, 3 * num_gemms),
                'scaling_bwd': DelayedScaling(recipe, 2 * num_gemms),
            }

    def _forward_impl(
        self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        compute = getattr(super(), '_forward_impl', torch.nn.functional.linear)
        recipe = GlobalState.recipe
        if not GlobalState.depth or recipe is None:
            result: torch.Tensor = compute(input, weight, *args, **kwargs)
            return result
        self.init_fp8_metadata()
        meta = getattr(self, 'fp8_meta', {})
        if self.training:
            for direction, state in meta.items():
                if not any(state is known for known in GlobalState.registered[direction]):
                    GlobalState.registered[direction].append(state)
        first = torch.is_grad_enabled() and GlobalState.take_first()
        forward = meta.get('scaling_fwd')
        tokens = _Rounded.apply(input, forward, INPUT)
        if isinstance(weight, fp8_weights.QuantizedWeight):
            product = fp8_weights.Product.apply(tokens, weight)
        else:
            product = compute(tokens, _Rounded.apply(weight, forward, WEIGHT), *args, **kwargs)
        return _RoundedGradient.apply(product, recipe, meta.get('scaling_bwd'), first)


class Float8Column(InFp8, ColumnParallelLinear):
    """Split by columns."""


class Float8Row(InFp8, RowParallelLinear):
    """Split by rows."""


class _Matrix(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(32, 32, dtype=torch.bfloat16))


class Linear(InFp8, _Matrix):
    """One that stands alone, of a weight of shape [32, 32]."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._forward_impl(tokens, self.weight)


def layers_compute_in_fp8() -> None:
    """Upstream's layers are these, and its contexts of fp8 mean something to them."""
    provider = backends.LocalSpecProvider
    experts = MLPSubmodules(linear_fc1=Float8Column, linear_fc2=Float8Row, activation_func=None)
    provider.column_parallel_linear = lambda _: Float8Column
    provider.row_parallel_linear = lambda _: Float8Row
    provider.grouped_mlp_modules = lambda *_: partial(SequentialMLP, submodules=experts)
    fp8_weights.install()
    fp8_utils.TEDelayedScaling = DelayedScaling
    transformer_block.get_fp8_context = fp8_utils.get_fp8_context = _context
    transformer_config.is_te_min_version = lambda *_: True


def _context(config: Any, layer_no: int = -1, is_init: bool = False) -> AbstractContextManager:
    """Upstream's `get_fp8_context`."""
    if is_init and config.fp8_param:
        return weights_in_fp8(config.fp8_recipe, Recipe.of(config))
    if is_init or not config.fp8 or fp8_utils.is_first_last_bf16_layer(config, layer_no):
        return nullcontext()
    group = parallel_state.get_amax_reduction_group(
        with_context_parallel=True, tp_only_amax_red=config.tp_only_amax_red
    )
    return autocast(Recipe.of(config), group)
