# SPDX-License-Identifier: Apache-2.0
"""Fault points within a forward step of upstream's loop."""

from collections.abc import Callable

import torch

from moevement_ext import faults
from moevement_ext.faults import Phase

Forward = Callable[..., tuple[object, object]]
"""Upstream's forward step of a micro-batch: returns the output and a function for its loss."""


def armed_forward(forward_step: Forward) -> Forward:
    """Add the fault points of forward and backward to `forward_step`, for fault injection."""

    def struck(*args: object, **kwargs: object) -> tuple[object, object]:
        output, loss = forward_step(*args, **kwargs)
        faults.point(Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATE_FORWARD)
        if torch.is_tensor(output) and output.requires_grad:
            output.register_hook(lambda gradient: faults.point(Phase.BACKWARD))
        return output, loss

    return struck
