# SPDX-License-Identifier: Apache-2.0
"""Adam with the state and the rules of Transformer Engine's FusedAdam, by operations of torch.

Its kernels need a GPU, and round otherwise: what is alike is where the state lies, what a step
counts, and what is left alone. `tests/gpu/test_stand_ins.py` compares the two.
"""

from collections.abc import Iterable
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """Counts steps by parameter group, as an int; state comes with the first step, in fp32.

    With `master_weights` only the state is made, as it would be: updates of such parameters are
    not written here.
    """

    COUNTS_STEPS_OF_EMPTY_GROUPS = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        assert not capturable  # a job that is protected records no updates
        defaults = {'lr': lr, 'betas': betas, 'eps': eps, 'weight_decay': weight_decay}
        super().__init__(params, defaults | {'bias_correction': bias_correction})
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.master_weights = master_weights
        self.store_param_remainders = store_param_remainders and master_weights

    # The last argument has no default, and upstream does not give it.
    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        state = self.state[param]
        for name in ('exp_avg', 'exp_avg_sq'):
            state[name] = torch.zeros_like(param, dtype=torch.float32)
        if self.master_weights and store_param_remainders:
            state['master_param'] = torch.zeros_like(param, dtype=torch.int16)
        elif self.master_weights:
            state['master_param'] = param.detach().clone().float()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Other tensors take the place of those that were there."""
        super().load_state_dict(state_dict)
        held = [param for group in self.param_groups for param in group['params']]
        saved = [index for group in state_dict['param_groups'] for index in group['params']]
        for index, param in zip(saved, held, strict=True):
            if index in state_dict['state']:
                loaded = state_dict['state'][index].items()
                self.state[param] = {
                    name: value if value.dtype == torch.int16 else value.detach().clone().float()
                    for name, value in loaded
                }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            if group['params'] or self.COUNTS_STEPS_OF_EMPTY_GROUPS:
                group['step'] = group.get('step', 0) + 1
            for param in group['params']:
                if not self.state[param]:
                    remainders = self.store_param_remainders and param.dtype == torch.bfloat16
                    self.initialize_state(param, remainders)
                if param.grad is not None:
                    self._update(group, param)

    def _update(self, group: dict[str, Any], param: torch.Tensor) -> None:
        assert not self.master_weights
        first, second = (self.state[param][name] for name in ('exp_avg', 'exp_avg_sq'))
        gradient, decay = param.grad.float(), group['weight_decay']
        if not self.adam_w_mode:
            gradient = gradient + decay * param
        for moment, beta, new in zip(
            (first, second), group['betas'], (gradient, gradient * gradient), strict=True
        ):
            moment.mul_(beta).add_(new, alpha=1 - beta)
        corrections = [
            1 - beta ** group['step'] if group['bias_correction'] else 1.0
            for beta in group['betas']
        ]
        update = first / corrections[0] / ((second / corrections[1]).sqrt() + group['eps'])
        if self.adam_w_mode:
            update += decay * param
        param.sub_(group['lr'] * update)


class OlderFusedAdam(FusedAdam):
    """Leaves out groups without parameters, as versions before 2.20 did."""

    COUNTS_STEPS_OF_EMPTY_GROUPS = False
