# SPDX-License-Identifier: Apache-2.0
"""Fault points within a forward step of upstream's loop."""

from collections.abc import Callable
from typing import Any

import torch

from moevement_ext import faults
from moevement_ext.faults import Phase


def armed_forward(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """`forward_step` with the fault points of forward and backward, for fault injection."""

    def struck(*args: Any, **kwargs: Any) -> Any:
        output, loss = forward_step(*args, **kwargs)
        faults.point(Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATE_FORWARD)
        if torch.is_tensor(output) and output.requires_grad:
            output.register_hook(lambda gradient: faults.point(Phase.BACKWARD))
        return output, loss

    return struck
