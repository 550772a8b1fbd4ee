# SPDX-License-Identifier: Apache-2.0
"""Adam with the state and the rules of Transformer Engine's FusedAdam, by operations of torch.

Its kernels need a GPU, and round otherwise: what is alike is where the state lies and in which
form, what a step counts, and what is left alone. `tests/transformer_engine` and
`tests/gpu/test_stand_ins.py` compare the two.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tests.stand_ins.float8 import LARGEST, Float8Tensor

FP32, FP16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.uint8
NAMES = 'exp_avg', 'exp_avg_sq', 'master_param'
RANGE = {FP16: torch.finfo(FP16).max / 2, FP8: LARGEST}
"""What the largest element of a tensor is scaled to."""


class FusedAdam(torch.optim.Optimizer):
    """Counts steps by parameter group, as an int; state comes with the first step.

    Moments, and masters if it keeps them, are fp32, or of 16 or 8 bits with an fp32 scale each. An
    update is computed in fp32 from what they stand for; the weight is rounded from the master of
    that computation, before the master itself is.
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
        master_weight_dtype: torch.dtype = FP32,
        exp_avg_dtype: torch.dtype = FP32,
        exp_avg_sq_dtype: torch.dtype = FP32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        assert not capturable  # a job that is protected records no updates
        if master_weights and master_weight_dtype not in (FP32, FP16):
            raise RuntimeError('masters of fp32 and fp16 only')
        defaults = {'lr': lr, 'betas': betas, 'eps': eps, 'weight_decay': weight_decay}
        super().__init__(params, defaults | {'bias_correction': bias_correction})
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.master_weights = master_weights
        self.name_to_dtype_map = dict(
            zip(NAMES, (exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype), strict=True)
        )
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = (
            store_param_remainders and master_weights and master_weight_dtype == FP32
        )
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    # ---- state

    # The last argument has no default, and upstream does not give it.
    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        self._initialize_state(param, 'exp_avg')
        self._initialize_state(param, 'exp_avg_sq')
        if self.master_weights:
            self._initialize_state(param, 'master_param', store_param_remainders)
            if not store_param_remainders:
                self.set_scaled_state(param, 'master_param', param.detach().float().clone())

    def _initialize_state(
        self, param: torch.Tensor, name: str, store_param_remainders: bool = False
    ) -> None:
        dtype = self.name_to_dtype_map[name]
        stored = torch.int16 if store_param_remainders else dtype
        self.state[param][name] = (
            Float8Tensor.zeros(param)
            if dtype == FP8
            else torch.zeros_like(param, dtype=stored).detach()
        )
        if dtype != FP32:
            scale = torch.ones(1, device=param.device)
            self._scales.setdefault(param, {})[name] = scale

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """In fp32 what a state stands for; remainders as they are."""
        stored = self.state[param][name]
        dtype = self.name_to_dtype_map[name]
        if dtype == FP32:
            return stored
        unscaled: torch.Tensor = stored.float()
        return unscaled * self._scales[param][name] if dtype == FP16 else unscaled

    def set_scaled_state(self, param: torch.Tensor, name: str, unscaled: torch.Tensor) -> None:
        """Store an fp32 tensor, or remainders, in the form of the state."""
        remainders = name == 'master_param' and self._has_remainders(param)
        assert unscaled.dtype == (torch.int16 if remainders else FP32)
        if name not in self.state[param]:
            self._initialize_state(param, name, remainders)
        if self.name_to_dtype_map[name] == FP32:
            self.state[param][name].copy_(unscaled)
        else:
            self._apply_scale(name, unscaled, self.state[param][name], self._scales[param][name])

    def _apply_scale(
        self, name: str, unscaled: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor
    ) -> None:
        dtype = self.name_to_dtype_map[name]
        if dtype == BF16:
            stored.copy_(unscaled)
            return
        scale.copy_(unscaled.abs().max() / RANGE[dtype])
        if isinstance(stored, Float8Tensor):
            stored._quantizer.scale.copy_(1 / scale)  # infinite, if all elements are 0
            stored.copy_(unscaled)
        else:
            stored.copy_(unscaled * torch.where(scale > 0, scale.reciprocal(), 0.0))

    def _has_remainders(self, param: torch.Tensor) -> bool:
        """Also of a weight in fp8, which looks like one in bf16: its update then fails."""
        return self.store_param_remainders and param.dtype == BF16

    # ---- dense checkpoints

    def state_dict(self) -> dict[str, Any]:
        result = super().state_dict()
        for index, param in self._numbered(result):
            if index in result['state']:
                names = result['state'][index]
                result['state'][index] = {n: self.get_unscaled_state(param, n) for n in names}
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Other tensors take the place of those that were there."""
        super().load_state_dict(state_dict)
        for index, param in self._numbered(state_dict):
            if index in state_dict['state']:
                self.state[param] = {}
                for name, value in state_dict['state'][index].items():
                    remainders = name == 'master_param' and self._has_remainders(param)
                    self.set_scaled_state(param, name, value if remainders else value.float())

    def _numbered(self, state_dict: dict[str, Any]) -> Iterator[tuple[int, torch.Tensor]]:
        held = [param for group in self.param_groups for param in group['params']]
        saved = [index for group in state_dict['param_groups'] for index in group['params']]
        return zip(saved, held, strict=True)

    # ---- update

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for param in group['params']:
                setattr(param, 'decoupled_grad' if self.use_decoupled_grad else 'grad', None)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            if group['params'] or self.COUNTS_STEPS_OF_EMPTY_GROUPS:
                group['step'] = group.get('step', 0) + 1
            for param in group['params']:
                if not self.state[param]:
                    self.initialize_state(param, self._has_remainders(param))
                gradient = (
                    getattr(param, 'decoupled_grad', None)
                    if self.use_decoupled_grad
                    else param.grad
                )
                if gradient is not None:
                    self._update(group, param, gradient.float())

    def _update(self, group: dict[str, Any], param: torch.Tensor, gradient: torch.Tensor) -> None:
        if self._has_remainders(param) and hasattr(param, '_quantizer'):
            raise RuntimeError('masters of weights in fp8 must be fp32 when they are computed with')
        first, second = (self.get_unscaled_state(param, name) for name in NAMES[:2])
        master = self._master(param)
        decay = group['weight_decay']
        if not self.adam_w_mode:
            gradient = gradient + decay * master
        moments = [
            moment * beta + new * (1 - beta)
            for moment, beta, new in zip(
                (first, second), group['betas'], (gradient, gradient * gradient), strict=True
            )
        ]
        corrections = [
            1 - beta ** group['step'] if group['bias_correction'] else 1.0
            for beta in group['betas']
        ]
        update = moments[0] / corrections[0]
        update /= (moments[1] / corrections[1]).sqrt() + group['eps']
        if self.adam_w_mode:
            update += decay * master
        for name, moment in zip(NAMES[:2], moments, strict=True):
            self.set_scaled_state(param, name, moment)
        self._write(param, master - group['lr'] * update)

    def _master(self, param: torch.Tensor) -> torch.Tensor:
        """What is updated; of an fp32 parameter itself, also if it has a master."""
        if self._has_remainders(param):
            return join(param, self.state[param]['master_param'])
        if self.master_weights and param.dtype != FP32:
            return self.get_unscaled_state(param, 'master_param')
        return param.detach().float()

    def _write(self, param: torch.Tensor, master: torch.Tensor) -> None:
        """Round the weight, one in fp8 by the scale it has at present, and then the master."""
        if self._has_remainders(param):
            weight, remainder = split(master)
            param.detach().copy_(weight)
            self.state[param]['master_param'].copy_(remainder)
            return
        param.detach().copy_(master)
        if self.master_weights:
            read = param.dtype != FP32
            kept = master if read else self.get_unscaled_state(param, 'master_param')
            self.set_scaled_state(param, 'master_param', kept)


class OlderFusedAdam(FusedAdam):
    """Leaves out groups without parameters, as versions before 2.20 did."""

    COUNTS_STEPS_OF_EMPTY_GROUPS = False


# ---- masters in fp32 as a bf16 weight and 16 more bits
#
# The weight is the upper half of the master, one more where the lower half, read as int16, is
# negative: so it is the master rounded, with halves away from zero.


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a bf16 weight and its int16 remainder."""
    low = remainder.to(torch.int32)
    high = weight.detach().view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
    return ((high << 16) | (low & 0xFFFF)).view(torch.float32)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bf16 weight and the int16 remainder of an fp32 master."""
    bits = master.contiguous().view(torch.int32)
    low = (bits & 0xFFFF).to(torch.int16)
    high = (bits >> 16) + (low < 0).to(torch.int32)
    return high.to(torch.int16).view(torch.bfloat16), low
