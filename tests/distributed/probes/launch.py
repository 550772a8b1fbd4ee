# SPDX-License-Identifier: Apache-2.0
"""Which functions of upstream's trainer are not upstream's own when training would start."""

import json
import os
import sys
from typing import Any

from megatron.core.optimizer import optimizer as optimizers
from megatron.core.optimizer.optimizer import ChainedOptimizer, MixedPrecisionOptimizer
from megatron.core.pipeline_parallel import schedules
from megatron.training import checkpointing, training

from megatron.moevement import pretrain_gpt


def print_replaced_functions() -> None:
    """Print their names as JSON instead of training."""
    before = dict(_functions())

    def instead_of_training(*args: Any, **kwargs: Any) -> None:
        now = dict(_functions())
        replaced = sorted(name for name in before if now[name] is not before[name])
        print('replaced:', json.dumps(replaced))
        sys.stdout.flush()
        os._exit(0)

    pretrain_gpt.pretrain = instead_of_training


def _functions() -> Any:
    places = (
        training,
        schedules,
        checkpointing,
        optimizers,
        ChainedOptimizer,
        MixedPrecisionOptimizer,
    )
    for place in places:
        for name, value in vars(place).items():
            if callable(value):
                yield f'{place.__name__}.{name}', value
