# SPDX-License-Identifier: Apache-2.0
"""What can be observed of delayed scaling: of the stand-in as of the real one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megatron.moevement.state import low_precision

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
