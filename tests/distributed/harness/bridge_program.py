# SPDX-License-Identifier: Apache-2.0
"""`examples/bridge_loop.py` on stand-ins for the functions of Megatron-Bridge that it calls.

They take what Bridge's take, by name and in the order of its source (0.7.0, commit 067f987d), and
do of it what training needs, with the model of `examples/small_gpt.py`.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from examples import small_gpt  # the first import of Megatron

# isort: split

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import (
    get_num_microbatches,
    init_num_microbatches_calculator,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import (
    RerunMode,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)

from megatron.moevement import SparseCheckpointConfig

JOBS: list[Any] = []
"""What `attach` has yielded."""


@dataclass
class GlobalState:
    cfg: Any = None
    train_state: Any = field(
        default_factory=lambda: SimpleNamespace(step=0, consumed_train_samples=0)
    )
    _timers: Any = None


def build_pretraining_data_loader(
    dataset: Any,
    consumed_samples: int,
    dataloader_type: str,
    micro_batch_size: int,
    num_workers: int,
    data_sharding: bool,
    worker_init_fn: Any = None,
    collate_fn: Any = None,
    pin_memory: bool = True,
    persistent_workers: bool = False,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
    drop_last: bool | None = True,
    global_batch_size: int | None = None,
    seed: int | None = None,
) -> Any:
    assert data_parallel_size == parallel_state.get_data_parallel_world_size()
    plan: Any = SimpleNamespace(micro_batch_size=micro_batch_size, seq_length=small_gpt.SEQUENCE)
    return small_gpt.batches(dataset, plan, consumed_samples)


def get_dataset_provider(dataset_config: Any) -> Any:
    def provide(train_val_test_num_samples: Any, dataset_config: Any) -> Any:
        return dataset_config.path, None, None

    return provide


def setup(state: GlobalState, train_valid_test_datasets_provider: Any) -> Any:
    config = state.cfg
    assert config.checkpoint.load is None, 'the job decides what is loaded'
    init_num_microbatches_calculator(
        torch.distributed.get_rank(), None, config.train.global_batch_size,
        config.train.micro_batch_size, config.data_parallel_size,
    )  # fmt: skip
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    torch.distributed.barrier()
    built = small_gpt.build(config.model, config.optimizer, config.ddp)
    train_valid_test_datasets_provider([0, 0, 0], config.dataset)
    manager = SimpleNamespace(load=None)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    names = 'model', 'optimizer', 'scheduler'
    return SimpleNamespace(
        state=state, checkpoint_manager=manager, pg_collection=groups,
        **dict(zip(names, built, strict=True)),
    )  # fmt: skip


def train_step(
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    global_state: GlobalState,
    pg_collection: Any,
    forward_backward_func: Any,
    p2p_communicator: Any,
) -> tuple[Any, ...]:
    train = global_state.cfg.train
    assert not train.check_optimizer_step_success and train.skip_sync_grad_norm_across_mp
    machine, runs = get_rerun_state_machine(), 0
    while machine.should_run_forward_backward(data_iterator):
        runs += 1
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward_func(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=get_num_microbatches(),
            seq_length=small_gpt.SEQUENCE,
            micro_batch_size=train.micro_batch_size,
            decoder_seq_length=small_gpt.SEQUENCE,
            forward_only=False,
            adjust_tensor_shapes_fn=None,
            p2p_communicator=p2p_communicator,
            pg_collection=pg_collection,
        )
    assert runs == 1, 'the rerun machine was left half-way'
    successful, norm, zeros = optimizer.step()
    if successful:
        samples = get_num_microbatches() * train.micro_batch_size
        scheduler.step(increment=samples * global_state.cfg.data_parallel_size)
    mean = {'lm loss': torch.stack([loss['lm loss'] for loss in losses]).mean()} if losses else {}
    return mean, 0, False, False, 0, norm, zeros, None


def save_checkpoint_and_time(
    state: GlobalState,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    checkpoint_manager: Any,
) -> None:
    torch.distributed.barrier()
    assert state._timers is None
    state._timers = 'running'
    now = state.train_state
    print(f'saved iteration {now.step}, samples {now.consumed_train_samples}', flush=True)


def _finish_train(global_state: GlobalState, checkpoint_manager: Any) -> None:
    JOBS[0].write_digest(Path(sys.argv[sys.argv.index('--digest') + 1]))


def same(forward_step_func: Any, state: GlobalState) -> Any:
    return forward_step_func


NAMES: dict[str, dict[str, Any]] = {
    'data.samplers': {'build_pretraining_data_loader': build_pretraining_data_loader},
    'data.utils': {'get_dataset_provider': get_dataset_provider},
    'training.checkpointing': {'CheckpointLoadContext': SimpleNamespace},
    'training.config': {'ConfigContainer': Any, 'runtime_config_update': lambda cfg: None},
    'training.setup': {'setup': setup},
    'training.state': {'GlobalState': GlobalState},
    'training.train': {
        '_finish_train': _finish_train,
        'save_checkpoint_and_time': save_checkpoint_and_time,
        'train_step': train_step,
    },
    'training.utils.train_utils': {'prepare_forward_step_func': same},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ('--data', '--dir', '--run-id', '--events'):
        parser.add_argument(name)
    parser.add_argument('--iterations', type=int)
    options, _ = parser.parse_known_args()
    for place, names in NAMES.items():
        module = ModuleType(f'megatron.bridge.{place}')
        vars(module).update(names)
        sys.modules[module.__name__] = module
    from examples import bridge_loop

    attach = bridge_loop.attach

    @contextmanager
    def noted(*args: Any) -> Iterator[Any]:
        with attach(*args) as job:
            JOBS.append(job)
            yield job

    bridge_loop.attach = noted
    model, optimizer, ddp = small_gpt.configurations(int(os.environ['WORLD_SIZE']))
    model.seq_length = small_gpt.SEQUENCE  # type: ignore[attr-defined]
    config = SimpleNamespace(
        model=model, optimizer=optimizer, ddp=ddp, scheduler='any', rng='any',
        train=SimpleNamespace(
            train_iters=options.iterations, micro_batch_size=2, global_batch_size=16
        ),
        logger=SimpleNamespace(log_interval=10),
        checkpoint=SimpleNamespace(load=None, save='dense', save_interval=4),
        data_parallel_size=1,
        dataset=SimpleNamespace(
            path=Path(options.data), dataloader_type='single', num_workers=0, data_sharding=True
        ),
    )  # fmt: skip

    sparse = SparseCheckpointConfig(
        window=4, dir=options.dir, run_id=options.run_id, events=options.events
    )
    bridge_loop.pretrain(config, small_gpt.forward_step, sparse, small_gpt.BACKEND)
