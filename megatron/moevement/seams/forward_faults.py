# SPDX-License-Identifier: Apache-2.0
"""Fault points within a forward step of upstream's loop."""

from collections.abc import Callable

import torch

from moevement_ext import faults
from moevement_ext.faults import Phase

Forward = Callable[..., tuple[object, object]]
"""What upstream calls for a micro-batch: returns its output, and what makes a loss of it."""


def armed_forward(forward_step: Forward) -> Forward:
    """`forward_step` with the fault points of forward and backward, for fault injection."""

    def struck(*args: object, **kwargs: object) -> tuple[object, object]:
        output, loss = forward_step(*args, **kwargs)
        faults.point(Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATE_FORWARD)
        if torch.is_tensor(output) and output.requires_grad:
            output.register_hook(lambda gradient: faults.point(Phase.BACKWARD))
        return output, loss

    return struck
