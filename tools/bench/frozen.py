# SPDX-License-Identifier: Apache-2.0
"""Measures the time that frozen operators save in a replayed iteration (the paper: a third).

    python -m tools.bench.frozen --json frozen.json

One process trains one stage of a model on Megatron's schedule, as a replay does. Iterations with
none, half and all of the experts frozen, and with all operators frozen, take turns; ratios to
"none" are taken within a round. Frozen operators have no weight gradient and no update. Uses a GPU
if there is one; otherwise measures CPU time, which other work on the machine does not affect.

Exit status: 0 done.
"""

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from megatron.moevement.seams import cpu_device
from tools.lab.arguments import Parser
from tools.lab.benchmark import exit_on_sigterm, run_benchmark
from tools.lab.figures import Spread
from tools.lab.hardware import Hardware

_VOCABULARY = 512
_MICRO_BATCHES = 4
_NONE = 'none'


class Shape(NamedTuple):
    """The model and its batch."""

    layers: int
    hidden: int
    experts: int
    sequence: int
    micro_batch: int
    rounds: int


class FrozenReport(msgspec.Struct, frozen=True):
    """Result of the measurement."""

    hardware: Hardware
    shape: dict[str, int]
    iteration_s: Spread
    """Seconds per iteration with nothing frozen."""
    over_none: dict[str, Spread]
    """Ratios of the iteration time to `iteration_s`, by frozen part."""
    expert_share: float
    """Share of the parameters that belongs to experts."""


class Stage:
    """Model and optimizer of one rank, with the parts that a replay freezes. Single process."""

    def __init__(self, shape: Shape) -> None:
        import torch
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
        from megatron.core.transformer import TransformerConfig

        from megatron.moevement.state.training_state import TrainingState

        backend = 'gloo' if cpu_device.needed() else 'nccl'
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel(create_gloo_process_groups=backend == 'gloo')
        torch.manual_seed(1234)
        model_parallel_cuda_manual_seed(1234)
        config = TransformerConfig(
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            num_attention_heads=4,
            num_moe_experts=shape.experts,
            moe_router_topk=2,
            moe_ffn_hidden_size=4 * shape.hidden,
            add_bias_linear=False,
            finalize_model_grads_func=finalize_model_grads,
        )
        gpt = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=shape.experts),
            vocab_size=_VOCABULARY,
            max_sequence_length=shape.sequence,
        ).cuda()
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self._shape = shape
        self._model = [DistributedDataParallel(config, ddp, gpt)]
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer='adam', lr=1e-4, clip_grad=1.0, use_distributed_optimizer=True
            ),
            self._model,
        )
        self.training = TrainingState(self._model, self._optimizer, None)
        self._torch = torch

    def frozen_sets(self) -> dict[str, list[str]]:
        """Names of operators, by name of the measured case."""
        kinds = self.training.kinds
        experts = [name for name, kind in kinds.items() if kind == 'expert']
        return {
            _NONE: [],
            'half of the experts': experts[::2],
            'all experts': experts,
            'all operators': list(kinds),
        }

    def expert_share(self) -> float:
        """Share of the parameters that belongs to experts."""
        sizes = {
            name: sum(parameter.numel() for parameter in operator.parameters.values())
            for name, operator in self.training.operators.items()
        }
        experts = sum(size for name, size in sizes.items() if '.expert' in name)
        return experts / sum(sizes.values())

    def seconds(self, names: Sequence[str]) -> float:
        """Time of an iteration with these operators frozen."""
        self.training.freeze(names)
        began = self._clock()
        self._iterate()
        return self._clock() - began

    def _iterate(self) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self._model:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=self._batches(),
            model=self._model,
            num_microbatches=_MICRO_BATCHES,
            seq_length=self._shape.sequence,
            micro_batch_size=self._shape.micro_batch,
            forward_only=False,
        )
        self._optimizer.step()

    def _batches(self) -> Iterator[Any]:
        torch, shape = self._torch, self._shape
        generator = torch.Generator().manual_seed(1)
        while True:
            size = (shape.micro_batch, shape.sequence + 1)
            yield torch.randint(0, _VOCABULARY, size, generator=generator).cuda()

    def _forward(self, data: Iterator[Any], model: Any) -> tuple[Any, Any]:
        torch, length = self._torch, self._shape.sequence
        tokens = next(data)
        positions = torch.arange(length).expand(len(tokens), -1).cuda()
        future = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1).cuda()
        output = model(tokens[:, :-1], positions, future, labels=tokens[:, 1:])
        return output, lambda losses: (losses.mean(), {'lm loss': losses.detach().mean()})

    def _clock(self) -> float:
        if cpu_device.needed():
            return time.process_time()
        self._torch.cuda.synchronize()
        return time.perf_counter()


def measure(shape: Shape) -> FrozenReport:
    """Run all rounds in this process."""
    logging.disable()  # upstream warns that its model class is old
    warnings.simplefilter('ignore')
    gpu = not cpu_device.needed()
    hardware = Hardware.here(gpu=gpu)
    if not gpu:
        cpu_device.install()
    stage = Stage(shape)
    sets = stage.frozen_sets()
    rounds: list[dict[str, float]] = []
    with stage.training.frozen.replaying():
        for _ in range(shape.rounds + 1):  # the first round is the warm-up
            rounds.append({name: stage.seconds(names) for name, names in sets.items()})
    return FrozenReport(
        hardware,
        shape._asdict(),
        Spread.of([of_round[_NONE] for of_round in rounds[1:]]),
        {
            name: Spread.of([of_round[name] / of_round[_NONE] for of_round in rounds[1:]])
            for name in sets
        },
        stage.expert_share(),
    )


def show(report: FrozenReport, console: Console) -> None:
    """Print the result for people."""
    console.print(report.hardware.line(), highlight=False, soft_wrap=True)
    console.print(
        f'{report.expert_share:.0%} of the parameters are in experts; an iteration with nothing '
        f'frozen takes {report.iteration_s.text(3)} s',
        highlight=False,
        soft_wrap=True,
    )
    table = Table('frozen')
    table.add_column('time over none', justify='right')
    for name, spread in report.over_none.items():
        table.add_row(name, spread.text())
    console.print(table)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the flags; exits with a message if they are wrong."""
    parser = Parser(prog='python -m tools.bench.frozen', description=__doc__)
    for name, default in Shape(2, 256, 8, 128, 4, 10)._asdict().items():
        parser.add_argument(f'--{name.replace("_", "-")}', type=int, default=default,
                            help=f'(default: {default})')  # fmt: skip
    parser.add_argument('--json', type=Path, metavar='FILE', help='write the report here')
    args = parser.parse_args(argv)
    for name in Shape._fields:
        if getattr(args, name) < 1:
            flag = f'--{name.replace("_", "-")}'
            parser.error(f'{flag} {getattr(args, name)}: must be at least 1')
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    args = parse_arguments(argv)
    shape = Shape(**{name: getattr(args, name) for name in Shape._fields})
    return run_benchmark(
        'bench_frozen', lambda console: measure(shape), show, args.json, passed=lambda report: True
    )


if __name__ == '__main__':
    exit_on_sigterm()
    sys.exit(main())
