# SPDX-License-Identifier: Apache-2.0
"""The trainer under another project's protection, called as that project's documentation says."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from megatron.moevement.seams import starting

MOEVEMENT_SPARES = True
starting.prepare(sys.argv[1:] if __name__ == '__main__' else None)

FOLDER = 'MOEVEMENT_COMPARE_FOLDER'
"""Environment variable: the folder of lm-resiliency, if that protects the trainer."""

if __name__ != '__mp_main__':  # a subprocess, e.g. one that writes a checkpoint, is not a worker
    from megatron.training import get_args, training

    from megatron.moevement import pretrain_gpt
    from megatron.moevement.seams import patches


def _set_up(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Hand model, optimizer and scheduler to lm-resiliency, which may load them."""
    from lm_resiliency import InMemoryCkptConfig
    from lm_resiliency.integrations.megatron import enable_resiliency

    model, optimizer, scheduler = original(*args, **kwargs)
    counters = get_args()

    def position() -> dict[str, Any]:
        micro_batches = training.get_num_microbatches()
        samples = counters.data_parallel_size * counters.micro_batch_size * micro_batches
        return {
            'iteration': int(counters.curr_iteration) + 1,
            'samples': int(counters.consumed_train_samples) + samples,
            'scheduler': scheduler.state_dict(),
        }

    def move(value: dict[str, Any]) -> None:
        counters.iteration = counters.curr_iteration = value['iteration']
        counters.consumed_train_samples = value['samples']
        scheduler.load_state_dict(value['scheduler'])
        training.update_num_microbatches(value['samples'], consistency_check=False)

    config = InMemoryCkptConfig(
        disk_folder=os.environ[FOLDER], disk_flush_interval=0, replication_jump=1,
        pin_memory=False, skip_replication_if_hsdp=False, run_id='compare',
    )  # fmt: skip
    handle = enable_resiliency(
        model, optimizer, scheduler, interval=1, enable_detection=False, ckpt_config=config,
        extra_state_fn=position, load_extra_state_fn=move,
    )  # fmt: skip
    counters.iteration = counters.curr_iteration = max(counters.iteration, handle.step_count)
    return model, optimizer, scheduler


def main() -> None:
    print(f'compare: program started at {time.time():.3f}', flush=True)
    sys.argv[0] = 'pretrain_gpt.py'
    if FOLDER in os.environ:
        patches.wrap('megatron.training.training:setup_model_and_optimizer', _set_up)
    pretrain_gpt.main()


if __name__ == '__main__':
    main()
