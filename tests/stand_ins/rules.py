# SPDX-License-Identifier: Apache-2.0
"""What can be observed of an optimizer or a grouped layer: of the stand-in as of the real one."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from megatron.moevement.state import low_precision

FP32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8


def arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """Defaults of what it takes, by name; those without are `inspect.Parameter.empty`."""
    return {item.name: item.default for item in inspect.signature(function).parameters.values()}


class AdamFacts(NamedTuple):
    """What three steps leave, of one parameter with gradients and one without."""

    state: dict[str, tuple[torch.dtype, torch.Size]]
    """Dtype and shape by name of the state of either."""
    steps: list[Any]
    """Step counts of the group of both, and of a group without parameters."""
    without_gradient: list[float]
    """Everything of the parameter without: itself, then its state."""
    in_place: bool
    """The state is where the first step put it."""
    replaced_by_load: bool
    """Once a state dict is loaded, it is elsewhere, with the same values."""
    values: dict[str, torch.Tensor]
    """On the CPU, of the parameter with gradients: itself and its state."""


def facts_of_adam(kind: Callable[..., Any], device: str, adam_w_mode: bool = True) -> AdamFacts:
    """Make steps with an optimizer of `kind`, which takes what the stand-in's constructor does."""
    trained, idle = (torch.nn.Parameter(torch.ones(4, device=device)) for _ in range(2))
    groups = [{'params': [trained, idle]}, {'params': []}]
    adam = kind(groups, lr=0.1, betas=(0.8, 0.9), weight_decay=0.5, adam_w_mode=adam_w_mode)
    places = []
    for step in range(3):
        trained.grad = torch.arange(4.0, device=device) - step
        adam.step()
        places.append({name: held.data_ptr() for name, held in adam.state[trained].items()})
    before = dict(adam.state[trained])
    values = {name: held.clone() for name, held in before.items()}
    adam.load_state_dict(adam.state_dict())
    after = adam.state[trained]
    return AdamFacts(
        state={name: (held.dtype, held.shape) for name, held in before.items()},
        steps=[group.get('step') for group in adam.param_groups],
        without_gradient=torch.cat([idle.detach(), *adam.state[idle].values()]).tolist(),
        in_place=places[0] == places[-1],
        replaced_by_load=all(
            after[name].data_ptr() != held.data_ptr() and torch.equal(after[name], values[name])
            for name, held in before.items()
        ),
        values={'weight': trained.detach().cpu()} | {n: v.cpu() for n, v in values.items()},
    )


def masters_of_adam(kind: Callable[..., Any], device: str) -> dict[torch.dtype, torch.dtype]:
    """Dtypes of the masters that the optimizer keeps itself, by dtype of the parameter."""
    parameters = [
        torch.nn.Parameter(torch.ones(4, device=device, dtype=dtype))
        for dtype in (BF16, torch.float32)
    ]
    adam = kind(parameters, master_weights=True, store_param_remainders=True)
    for parameter in parameters:
        adam.initialize_state(parameter, parameter.dtype == BF16)
    return {each.dtype: adam.state[each]['master_param'].dtype for each in parameters}


def delayed_gradients_of_grouped(layer: Any, wanted: Sequence[bool]) -> dict[str, Any]:
    """What becomes of gradients that are computed later.

    Args:
        layer: as for `gradients_of_grouped`, with `delay_wgrad_compute`.
        wanted: for each weight whether it requires a gradient.
    """
    called: list[str] = []
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append('hook'))
    gradients_of_grouped(layer, wanted)
    before = list(called)
    try:
        layer.backward_dw()
        told = True
    except RuntimeError:
        told = False
    weights = [getattr(layer, f'weight{number}') for number in range(len(wanted))]
    return {
        'hooks': (before, called),
        'marked': [getattr(one, 'skip_backward_post_hook', False) for one in weights],
        'computed': told,
        'gradients': [None if one.grad is None else one.grad.float().cpu() for one in weights],
    }


class Formats(NamedTuple):
    """What a parameter and its state are kept in; fp8 is uint8."""

    weight: torch.dtype
    master: torch.dtype
    first: torch.dtype = FP32
    second: torch.dtype = FP32


FORMATS = {
    'remainders': Formats(BF16, FP32),
    'fp16': Formats(FP16, FP16, FP16, FP16),
    'fp16-master': Formats(BF16, FP16),
    'fp8-and-fp16-moments': Formats(BF16, FP16, FP8, FP16),
    'fp8-moments': Formats(BF16, FP32, FP8, FP8),
    'bf16-moments': Formats(BF16, FP32, BF16, BF16),
    'fp32-weight': Formats(FP32, FP16, FP8, FP16),
}
FORMATS_OF_FP8_WEIGHTS = {'c3': Formats(FP8, FP16), 'c4': Formats(FP8, FP16, FP8, FP16)}
"""With delayed scaling; see `fp8_weight_kind`."""

WeightKind = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Makes a weight in fp8 of values, a scale and a place for the largest value, fp32 [1] each."""
SCALE = 16.0
"""By which the values of a weight in fp8 are multiplied before they are rounded."""


def precise_adam(
    kind: Callable[..., Any],
    formats: Formats,
    device: str,
    count: int = 1,
    in_fp8: WeightKind | None = None,
) -> tuple[list[torch.Tensor], Any]:
    """Parameters of shape [64], which begin alike, and an optimizer that keeps their masters.

    Args:
        kind: class of the optimizer.
        formats: of parameters and state.
        device: of all tensors.
        count: of parameters.
        in_fp8: makes a weight in fp8, if that is its format.
    """
    start = torch.linspace(-3, 5, 64, device=device).sin()
    weights: list[torch.Tensor] = []
    for _ in range(count):
        if in_fp8 is None:
            weights.append(torch.nn.Parameter(start.to(formats.weight, copy=True)))
        else:
            scale, amax = (torch.full((1,), value, device=device) for value in (SCALE, 0.0))
            weights.append(in_fp8(start, scale, amax))
    adam = kind(
        weights,
        lr=0.01,
        weight_decay=0.1,
        master_weights=True,
        use_decoupled_grad=True,
        store_param_remainders=True,
        master_weight_dtype=formats.master,
        exp_avg_dtype=formats.first,
        exp_avg_sq_dtype=formats.second,
    )
    return weights, adam


def gradient_of(step: int, device: str) -> torch.Tensor:
    """Some fp32 gradient of shape [64] without zeros, another one for each step."""
    return torch.linspace(1, 9 + step, 64, device=device).cos() + 1.5


class PrecisionFacts(NamedTuple):
    """What three steps leave of two parameters, of which the second has no gradient."""

    state: dict[str, tuple[torch.dtype, torch.Size]]
    """Dtype and shape by name, of the bits that are stored."""
    scales: dict[str, tuple[torch.dtype, torch.Size]]
    """Of what they are multiplied by."""
    in_place: bool
    """Bits and scales are where the first step put them."""
    idle: bool
    """Those of the second parameter are as the first step made them, and so is its weight."""
    values: dict[str, torch.Tensor]
    """On the CPU in fp32, of the first parameter: the weight, and what its state stands for."""


def facts_of_precision(kind: Callable[..., Any], formats: Formats, device: str) -> PrecisionFacts:
    """Make steps with an optimizer of `kind` that keeps masters and moments in `formats`."""
    weights, adam = precise_adam(kind, formats, device, count=2)
    trained, idle = weights

    def bits(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        state = {name: low_precision.raw(held) for name, held in adam.state[weight].items()}
        return state | low_precision.scales(adam, weight)

    places, idles = [], []
    for step in range(3):
        trained.decoupled_grad = gradient_of(step, device)
        adam.step()
        places.append({name: held.data_ptr() for name, held in bits(trained).items()})
        idles.append([held.clone() for held in (idle.detach(), *bits(idle).values())])
    state = adam.state[trained]
    forms = {name: (held.dtype, held.shape) for name, held in bits(trained).items()}
    values = {name: adam.get_unscaled_state(trained, name).cpu().float() for name in state}
    return PrecisionFacts(
        state={name: form for name, form in forms.items() if name in state},
        scales={name: form for name, form in forms.items() if name not in state},
        in_place=places[0] == places[-1],
        idle=all(torch.equal(*pair) for pair in zip(idles[0], idles[-1], strict=True)),
        values={'weight': trained.detach().cpu().float()} | values,
    )


class Fp8UpdateFacts(NamedTuple):
    """What an update does to a part of a weight in fp8 with delayed scaling."""

    shared: bool
    """The part looks at the bytes and the scale of the whole."""
    written: list[int]
    """First and last element of the bytes that have changed."""
    scale_inv: float
    """Of the whole, after the scale was changed from `SCALE` to twice that before the update."""
    amax_is_of_update: bool
    """What is noted is the largest value that was rounded."""


def facts_of_fp8_update(
    kind: Callable[..., Any], in_fp8: WeightKind, device: str
) -> Fp8UpdateFacts:
    """Update elements 16 to 47 of a weight of 64 by an optimizer that has an fp16 master."""
    scale, amax = (torch.full((1,), value, device=device) for value in (SCALE, 0.0))
    values = torch.linspace(-3, 5, 64, device=device).sin()
    weight = in_fp8(values, scale, amax)
    part = weight.detach().view(-1)[16:48]
    adam = kind(
        [part], lr=0.5, master_weights=True, use_decoupled_grad=True, master_weight_dtype=FP16
    )
    bytes_ = low_precision.raw(weight)
    shared = (
        low_precision.raw(part).data_ptr() == bytes_.data_ptr() + 16
        and low_precision.weight_scale(part).data_ptr()
        == low_precision.weight_scale(weight).data_ptr()
    )
    before = bytes_.clone()
    scale.fill_(2 * SCALE)
    amax.zero_()
    part.decoupled_grad = torch.full((32,), -1.0, device=device)
    adam.step()
    changed = (bytes_ != before).nonzero().flatten().tolist()
    largest = adam.get_unscaled_state(part, 'master_param').abs().max()
    return Fp8UpdateFacts(
        shared=shared,
        written=[changed[0], changed[-1]],
        scale_inv=float(low_precision.weight_scale(weight)),
        amax_is_of_update=bool(torch.isclose(amax, largest, rtol=1e-3)),
    )


class TrackerFacts(NamedTuple):
    """What a tracker of random numbers does with a state."""

    is_generator: bool
    lives_on: bool
    """One that was taken before a fork has moved on after it."""
    comes_back: bool
    """The same numbers are drawn once its state is put back in place."""


def facts_of_tracker(tracker: Any, device: str) -> TrackerFacts:
    """Draw from a state of a new tracker, twice."""
    tracker.add('experts', 5)
    held = tracker.get_states()['experts']
    before = held.get_state()

    def drawn() -> torch.Tensor:
        with tracker.fork('experts'):
            return torch.rand(4, device=device)

    first, other = drawn(), drawn()
    lives_on = not torch.equal(held.get_state(), before) and not torch.equal(first, other)
    present = tracker.get_states()['experts']
    present.set_state(before)
    tracker.set_states({'experts': present})
    comes_back = torch.equal(drawn(), first)
    return TrackerFacts(isinstance(held, torch.Generator), lives_on, comes_back)


def gradients_of_grouped(layer: Any, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
    """Gradients of the tokens and of `weight0`, `weight1`, ..., on the CPU, in fp32.

    Args:
        layer: of three weights of shape [32, 16], filled here.
        wanted: for each weight whether it requires a gradient.
    """
    random = torch.Generator().manual_seed(1)
    weights = [getattr(layer, f'weight{number}') for number in range(len(wanted))]
    for weight, wants in zip(weights, wanted, strict=True):
        weight.data.copy_(torch.randn(32, 16, generator=random))
        weight.requires_grad_(wants)
    tokens = torch.randn(24, 16, generator=random).to(weights[0]).requires_grad_()
    product = layer(tokens, [8, 0, 16])
    product.backward(torch.randn(24, 32, generator=random).to(product))
    found = [tensor.grad for tensor in (tokens, *weights)]
    return [gradient if gradient is None else gradient.float().cpu() for gradient in found]


# ---- delayed scaling

ASKED: dict[str, Any] = {'margin': 1, 'amax_history_len': 4, 'amax_compute_algo': 'max'}
"""Of a recipe."""


class ScalingFacts(NamedTuple):
    """What a linear layer with delayed scaling keeps over three passes and an evaluation."""

    state: dict[str, tuple[torch.dtype, torch.Size]]
    """Dtype and shape by name."""
    created_early: bool
    """The first pass takes what was made before it."""
    in_place: bool
    """It is where it was made."""
    emptied: bool
    """At the end of a pass with gradients there is no largest value of the present."""
    left_by_evaluation: list[int]
    """Columns of the forward state in which a pass without gradients leaves one."""
    values: dict[str, torch.Tensor]
    """At the end, on the CPU."""


def facts_of_scaling(layer: Any, context: Callable[[], Any], device: str) -> ScalingFacts:
    """Compute with a linear layer of a weight of shape [32, 32], which is filled here.

    Args:
        layer: in bf16 on `device`.
        context: in which it computes in fp8.
        device: of all tensors.
    """
    random = torch.Generator().manual_seed(1)
    layer.weight.data.copy_(torch.randn(32, 32, generator=random))
    holder = torch.nn.ModuleList([layer])
    with torch.no_grad(), context():
        layer.init_fp8_metadata(num_gemms=1)
    made = dict(low_precision.scaling_of(holder))
    places = {name: held.data_ptr() for name, held in made.items()}
    early = all(not held.any() for name, held in made.items() if 'history' in name)
    for step in range(3):
        tokens = torch.randn(32, 32, generator=random) * (step + 1)
        tokens = tokens.to(device, torch.bfloat16).requires_grad_()
        with context():
            product = layer(tokens)
        product.backward(torch.randn(32, 32, generator=random).to(product))
    emptied = all(not held[0].any() for name, held in made.items() if 'history' in name)
    with torch.no_grad(), context():
        layer(torch.randn(32, 32, generator=random).to(device, torch.bfloat16))
    found = dict(low_precision.scaling_of(holder))
    present = found['0.scaling_fwd.amax_history'][0]
    return ScalingFacts(
        state={name: (held.dtype, held.shape) for name, held in found.items()},
        created_early=early and bool(made['0.scaling_fwd.amax_history'].any()),
        in_place=places == {name: held.data_ptr() for name, held in found.items()},
        emptied=emptied,
        left_by_evaluation=present.nonzero().flatten().tolist(),
        values={name: held.cpu() for name, held in found.items()},
    )
