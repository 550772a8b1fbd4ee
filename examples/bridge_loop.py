# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge's `pretrain` with `attach` inside.

    from bridge_loop import pretrain  # instead of that of megatron.bridge.training.pretrain

    pretrain(config, forward_step, SparseCheckpointConfig())

Written against the source of Megatron-Bridge 0.7.0 (commit 067f987d) as read: it has run with
stand-ins for Bridge's functions only. Bridge's own loop begins with a barrier, so it cannot be
called again after a failure; this one calls Bridge's `setup`, `train_step` and saves.
"""

import functools
from typing import Any

from megatron.bridge.data.samplers import build_pretraining_data_loader
from megatron.bridge.data.utils import get_dataset_provider
from megatron.bridge.training.checkpointing import CheckpointLoadContext
from megatron.bridge.training.config import ConfigContainer, runtime_config_update
from megatron.bridge.training.setup import setup
from megatron.bridge.training.state import GlobalState
from megatron.bridge.training.train import _finish_train, save_checkpoint_and_time, train_step
from megatron.bridge.training.utils.train_utils import prepare_forward_step_func
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    destroy_rerun_state_machine,
    initialize_rerun_state_machine,
)

from megatron.moevement import SparseCheckpointConfig, TrainingPlan, attach


def pretrain(
    config: ConfigContainer,
    forward_step: Any,
    sparse: SparseCheckpointConfig,
    backend: str = 'nccl',
) -> None:
    """Train as `config` says, one model chunk a rank, without evaluation and callbacks."""
    runtime_config_update(config)
    # A stage that replays does so alone: no reductions over all stages.
    config.train.check_optimizer_step_success = False
    config.train.skip_sync_grad_norm_across_mp = True
    plan = TrainingPlan(
        train_iters=config.train.train_iters,
        seq_length=config.model.seq_length,
        micro_batch_size=config.train.micro_batch_size,
        global_batch_size=config.train.global_batch_size,
        backend=backend,
        log_interval=config.logger.log_interval,
    )
    settings = {'data': config.dataset, 'schedule': config.scheduler, 'random': config.rng}
    state = GlobalState()
    state.cfg = config
    provider = get_dataset_provider(config.dataset)
    datasets: list[Any] = []
    made: Any = None

    @functools.wraps(provider)
    def provide(*args: object, **named: object) -> object:
        datasets[:] = provider(*args, **named)
        return tuple(datasets)

    def build() -> Any:
        nonlocal made
        destroy_num_microbatches_calculator()  # Bridge makes its own
        destroy_rerun_state_machine()
        source, config.checkpoint.load = config.checkpoint.load, None  # `load` loads, if need be
        made = setup(state, provide)
        config.checkpoint.load = source
        return made.model, made.optimizer, made.scheduler

    def load(*built: Any) -> tuple[int, int]:
        made.checkpoint_manager.load(CheckpointLoadContext(state, *built))
        return state.train_state.step, state.train_state.consumed_train_samples

    def data(consumed_samples: int) -> RerunDataIterator | None:
        source, group = config.dataset, made.pg_collection.dp
        loader = build_pretraining_data_loader(  # no collective, as only some ranks may call it
            datasets[0],
            consumed_samples,
            source.dataloader_type,
            plan.micro_batch_size,
            source.num_workers,
            source.data_sharding,
            data_parallel_rank=group.rank(),
            data_parallel_size=group.size(),
            global_batch_size=plan.global_batch_size,
        )
        return None if loader is None else RerunDataIterator(iter(loader))

    with attach(sparse, config.model, config.optimizer, config.ddp, plan, settings) as job:
        job.init_process_group()  # which Bridge finds
        built = job.set_up(build, load if config.checkpoint.load else None)
        own = P2PCommunicator(made.pg_collection.pp, config.model)
        forward = prepare_forward_step_func(forward_step, state)

        def step(data: Any, p2p_communicator: Any = own, pg_collection: Any = None) -> Any:
            destroy_rerun_state_machine()  # a failure may have stopped it half-way
            initialize_rerun_state_machine(mode=RerunMode.DISABLED)
            groups, run = pg_collection or made.pg_collection, get_forward_backward_func()
            return train_step(forward, data, *built, state, groups, run, p2p_communicator)

        def save(iteration: int) -> None:
            state.train_state.step = iteration
            state.train_state.consumed_train_samples = job.consumed_samples
            state._timers = None  # a failure leaves one running
            save_checkpoint_and_time(state, *built, 0.0, made.checkpoint_manager)

        def loop() -> None:  # called again after a failure of other ranks
            while job.iteration < plan.train_iters:
                losses, *_ = job.step(step)
                if losses and job.iteration % plan.log_interval == 0:
                    shown = ', '.join(f'{name} {float(loss):.6f}' for name, loss in losses.items())
                    print(f'iteration {job.iteration}/{plan.train_iters}: {shown}', flush=True)

        if config.checkpoint.save and config.checkpoint.save_interval:
            job.after_step(config.checkpoint.save_interval, save)
        job.train(loop, data)
        _finish_train(state, made.checkpoint_manager)
