# SPDX-License-Identifier: Apache-2.0
"""Makes the last rank a guest, as a launcher without a spare node does.

A rank of its unit that computes a training micro-batch, where others should, ends with an error.
"""

import os
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

from megatron.moevement.state import routes
from moevement_ext.config import GUEST


def last_rank() -> None:
    if os.environ['RANK'] == '3':
        os.environ[GUEST] = '1'
    have_computed, step = routes._Iteration._have_computed, schedules.forward_step

    def none_here(*given: Any, **more: Any) -> None:
        assert not torch.is_grad_enabled(), 'a guest computes'
        return step(*given, **more)

    def routed(self: Any) -> None:
        schedules.forward_step = none_here
        have_computed(self)

    routes._Iteration._have_computed = routed
