# SPDX-License-Identifier: Apache-2.0
"""What can be observed of an optimizer or a grouped layer: of the stand-in as of the real one."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

BF16 = torch.bfloat16


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
