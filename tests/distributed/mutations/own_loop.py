# SPDX-License-Identifier: Apache-2.0
"""The example of an own loop in the formats of the paper's Table 7, on stand-ins; and fused.

As if a user had written them into its configurations of the model, of the optimizer and of data
parallelism. Also with a step of recovery left out.
"""

import random
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from torch.utils.data import DataLoader

from megatron.moevement import attachment
from tests.distributed.mutations import precision
from tests.distributed.mutations.masters import masters
from tests.distributed.mutations.whole_job import leave_out

FP8 = torch.uint8


def c1() -> None:
    """All in fp16; steps overflow at first."""
    masters()
    _preset(
        TransformerConfig,
        bf16=False,
        fp16=True,
        params_dtype=torch.float16,
        pipeline_dtype=torch.float16,
    )
    _preset(OptimizerConfig, bf16=False, fp16=True, initial_loss_scale=2.0**20, hysteresis=1)
    _preset(DistributedDataParallelConfig, grad_reduce_in_fp32=True)
    _keep(torch.float16, torch.float16, torch.float16)


def c2() -> None:
    """Weights in fp8 with a scale for each tensor; Megatron holds the masters."""
    _weights_in_fp8('tensorwise')


def c3() -> None:
    """Weights in fp8 beside fp16 masters."""
    _weights_in_fp8('delayed')
    _keep(torch.float16, torch.float32, torch.float32)


def c4() -> None:
    """Moments of 8 and 16 bits as well."""
    _weights_in_fp8('delayed')
    _keep(torch.float16, FP8, torch.float16)


def c5() -> None:
    _weights_in_fp8('delayed')
    _keep(FP8, FP8, torch.float16)


def draws_between_steps() -> None:
    """After each step the loop opens a loader, and generates something; nothing is broken by it."""
    step = attachment.Attachment.step

    def drawing(self: Any, train_step: Any) -> Any:
        result = step(self, train_step)
        iter(DataLoader(range(3)))
        torch.rand(7), random.random(), np.random.rand()
        return result

    attachment.Attachment.step = drawing


def scales_not_restored() -> None:
    """C5; masters and moments are read with the scales of a fresh process."""
    c5()
    leave_out(precision.is_scale)


def _weights_in_fp8(recipe: str) -> None:
    masters()
    _preset(TransformerConfig, fp8='hybrid', fp8_recipe=recipe, fp8_param=True)
    _preset(DistributedDataParallelConfig, fp8_param_gather=True)
    _preset(OptimizerConfig, fp8_recipe=recipe)


def _keep(master: torch.dtype, first_moment: torch.dtype, second_moment: torch.dtype) -> None:
    _preset(
        OptimizerConfig,
        use_precision_aware_optimizer=True,
        main_params_dtype=master,
        exp_avg_dtype=first_moment,
        exp_avg_sq_dtype=second_moment,
    )


def _preset(kind: type, **settings: Any) -> None:
    check = kind.__post_init__

    def preset(self: Any) -> None:
        for name, value in settings.items():
            setattr(self, name, value)
        check(self)

    kind.__post_init__ = preset


def evaluates_after_steps() -> None:
    """All ranks draw and reduce after every other step."""
    set_up = attachment.Attachment.set_up

    def evaluate(iteration: int) -> None:
        drawn = torch.rand(1)
        torch.distributed.all_reduce(drawn)
        print(f'evaluation at iteration {iteration}, {float(drawn):.3f}', flush=True)

    def registering(job: attachment.Attachment, *args: Any, **settings: Any) -> Any:
        job.after_step(2, evaluate)
        return set_up(job, *args, **settings)

    attachment.Attachment.set_up = registering
