# SPDX-License-Identifier: Apache-2.0
"""State is made where the optimizer of Transformer Engine makes it, by its interface."""

from types import SimpleNamespace

import torch

from megatron.moevement.seams import cpu_device

cpu_device.install()

from megatron.moevement.state import iteration_state, optimizer_state  # noqa: E402


class FusedAdam(torch.optim.Optimizer):
    """As far as it differs from torch's: no default argument, and steps of groups."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {'lr': 1.0})
        self.store_param_remainders = True

    def initialize_state(self, parameter: torch.nn.Parameter, store_param_remainders: bool) -> None:
        dtype = torch.int16 if store_param_remainders else torch.float32
        self.state[parameter]['master_param'] = torch.zeros(parameter.shape, dtype=dtype)


def _upstream_optimizer(inner: torch.optim.Optimizer) -> SimpleNamespace:
    config = SimpleNamespace(use_precision_aware_optimizer=True)
    return SimpleNamespace(optimizer=inner, config=config, param_groups=inner.param_groups)


def test_low_precision_state_is_made_with_remainders_of_bf16_parameters_only() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2, dtype=dtype))
                  for dtype in (torch.bfloat16, torch.float32)]  # fmt: skip
    inner = FusedAdam(parameters)
    optimizer_state._allocate(_upstream_optimizer(inner))
    dtypes = [inner.state[parameter]['master_param'].dtype for parameter in parameters]
    assert dtypes == [torch.int16, torch.float32]
    assert all('step' not in state for state in inner.state.values())


def test_step_of_a_group_is_captured_where_the_optimizer_counts_it() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    fused, torchs = FusedAdam([parameter]), torch.optim.AdamW([parameter])
    steps = []
    for inner in (fused, torchs):
        inner.param_groups[0]['step'] = 8.0  # a dense checkpoint leaves it so
        steps += iteration_state._group_steps(_upstream_optimizer(inner))
    assert steps == [8, None]
