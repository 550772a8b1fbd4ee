# SPDX-License-Identifier: Apache-2.0
"""The trainer under another project's protection, called as that project's documentation says."""

import gc
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from megatron.moevement.seams import starting

MOEVEMENT_SPARES = True
starting.prepare(sys.argv[1:] if __name__ == '__main__' else None)

PEER = 'MOEVEMENT_COMPARE_PEER'
"""Environment variable: the peer that protects the trainer; unset: none, or one by flags."""
FOLDER = 'MOEVEMENT_COMPARE_FOLDER'
"""Environment variable: the folder of lm-resiliency."""
LM_RESILIENCY, IN_PROCESS = 'lm-resiliency', 'in-process'
BEGINS = 'compare: lm-resiliency begins at step '
"""Line of a log, before the step that lm-resiliency restored on this rank."""
# Ranks that train; others are reserves of the in-process restart.
_ACTIVE = 2

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
    print(f'{BEGINS}{handle.step_count}', flush=True)
    counters.iteration = counters.curr_iteration = max(counters.iteration, handle.step_count)
    return model, optimizer, scheduler


def _restarted_in_process(train: Callable[[], None]) -> None:
    """Train under nvidia-resiliency-ext's in-process restart, without its checks of GPUs.

    Upstream's own wrapper covers only part of parsing and training, and does not restart here.
    """
    from megatron.core import mpu, rerun_state_machine
    from nvidia_resiliency_ext import inprocess

    layers = inprocess.rank_assignment
    reserve = layers.Layer(min_ranks=_ACTIVE, max_ranks=_ACTIVE, flag=layers.LayerFlag.RESERVE)
    port = int(os.environ['MASTER_PORT'])

    class Forget(inprocess.finalize.Finalize):
        """Removes Megatron's global state of the interrupted attempt."""

        def __call__(self, state: Any) -> Any:
            training.destroy_global_state()
            rerun_state_machine.destroy_rerun_state_machine()
            mpu.destroy_model_parallel()
            gc.collect()
            return state

    def without_gpu_checks(wrapper: Any) -> None:
        wrapper.restart_health_check = wrapper.health_check

    inprocess.Wrapper._construct_restart_health_check = without_gpu_checks
    minute, often = timedelta(seconds=60), timedelta(seconds=0.2)

    @inprocess.Wrapper(
        initialize=inprocess.initialize.RetryController(min_world_size=_ACTIVE),
        rank_assignment=layers.Tree(layers=[reserve]),
        abort=inprocess.abort.AbortTorchDistributed(),
        finalize=Forget(),
        soft_timeout=minute, hard_timeout=1.5 * minute,
        heartbeat_interval=timedelta(seconds=1), heartbeat_timeout=minute,
        monitor_thread_interval=often, monitor_process_interval=often,
        last_call_wait=timedelta(seconds=0.5),
        barrier_timeout=2 * minute, completion_timeout=2 * minute,
        store_kwargs={'port': port + 2, 'timeout': 2 * minute},
    )  # fmt: skip
    def attempt(call_wrapper: inprocess.CallWrapper = None) -> None:  # found by its type
        os.environ['MASTER_PORT'] = str(port + 10 + call_wrapper.iteration)
        train()
        # The wrapper's last barrier fails, and a rank hangs, if the rank with the store ends first.
        sys.stdout.flush()
        os._exit(0)

    attempt()


def main() -> None:
    print(f'compare: program started at {time.time():.3f}', flush=True)
    sys.argv[0] = 'pretrain_gpt.py'
    peer = os.environ.get(PEER)
    if peer == LM_RESILIENCY:
        patches.wrap('megatron.training.training:setup_model_and_optimizer', _set_up)
    if peer == IN_PROCESS:
        _restarted_in_process(pretrain_gpt.main)
    else:
        pretrain_gpt.main()


if __name__ == '__main__':
    main()
