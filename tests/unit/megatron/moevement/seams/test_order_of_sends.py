# SPDX-License-Identifier: Apache-2.0
"""Do the stages of an interleaved schedule finish after their groups were reconnected over NCCL?

torch (2.11 to 2.15) has a stream for each pair of ranks in a group that connects with its first
operation. A group that is connected before, as after a failure, has a single stream, on which
each send and receive waits for the previous one. NCCL needs both ends to be present.
"""

import importlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron.moevement.seams import cpu_device

ROOT = Path(__file__).resolve().parents[5]
CHUNKS = 2
SHAPE = (4, 1, 8)


class Operation(NamedTuple):
    """A send or a receive; operations that it depends on must finish first."""

    rank: int
    number: int


def order(stage: int, stages: int, flush: bool) -> list[list[Any]]:
    """Upstream's schedule of one stage, over fake process groups.

    A list [number, kind, peer, group] for each operation, and [number] for each wait.
    """
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found: list[list[Any]] = []

    def noted(kind: str, peer: int, group: Any) -> Any:
        number = sum(len(entry) > 1 for entry in found)
        found.append([number, kind, peer, 'world' if group is dist.group.WORLD else 'pipeline'])
        return SimpleNamespace(wait=lambda: found.append([number]))

    dist.isend = lambda tensor, dst, group: noted('send', dst, group)
    dist.irecv = lambda tensor, src, group: noted('receive', src, group)
    dist.init_process_group('fake', rank=stage, world_size=stages, store=FakeStore())
    sizes = {
        'pipeline_model_parallel_size': stages,
        'virtual_pipeline_model_parallel_size': CHUNKS,
    }
    parallel_state.initialize_model_parallel(**sizes)
    config = TransformerConfig(
        num_layers=stages * CHUNKS,
        hidden_size=SHAPE[-1],
        num_attention_heads=1,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=True,
        batch_p2p_comm=False,
        overlap_p2p_comm_warmup_flush=flush,
        **sizes,
    )

    class Chunk(torch.nn.Module):
        """A model chunk."""

        model_type = ModelType.encoder_or_decoder
        share_embeddings_and_output_weights = False

        def __init__(self, number: int) -> None:
            super().__init__()
            self.config, self.vp_stage, self.input = config, number, None
            self.weight = torch.nn.Parameter(torch.ones(1))

        def set_input_tensor(self, tensors: Any) -> None:
            self.input = tensors[0] if isinstance(tensors, list) else tensors

        def forward(self) -> torch.Tensor:
            return self.weight * (torch.ones(SHAPE) if self.input is None else self.input)

    get_forward_backward_func()(
        forward_step_func=lambda data, chunk, *_: (chunk(), lambda out: (out.sum(), {})),
        data_iterator=[iter([])] * CHUNKS,
        model=[Chunk(number) for number in range(CHUNKS)],
        num_microbatches=2 * stages,
        seq_length=SHAPE[0],
        micro_batch_size=SHAPE[1],
    )
    return found


def print_orders(stages: int, flush: bool) -> None:
    """One line for each stage, from a fork of this process."""
    cpu_device.install()
    importlib.import_module('megatron.core.pipeline_parallel.schedules')  # once for all stages
    for stage in range(stages):
        if not (child := os.fork()):
            print(json.dumps(order(stage, stages, flush)), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


def orders(stages: int, flush: bool) -> list[list[list[Any]]]:
    program = f'from {__name__} import print_orders; print_orders({stages}, {flush})'
    variables = os.environ | {'PYTHONPATH': str(ROOT), 'TORCHDYNAMO_DISABLE': '1'}
    command = [sys.executable, '-c', program]
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == stages
    return found


def all_finish(orders: list[list[list[Any]]], reconnected: bool) -> bool:
    """True if all operations finish."""
    before: dict[Operation, set[Operation]] = {}
    ways: dict[Any, list[Operation]] = defaultdict(list)
    for rank, entries in enumerate(orders):
        last: dict[Any, Operation] = {}
        waited: set[Operation] = set()
        for number, *what in entries:
            operation = Operation(rank, number)
            if not what:
                waited = waited | {operation}
                continue
            kind, peer, group = what
            stream = group if reconnected else (group, peer)
            before[operation] = waited | ({last[stream]} if stream in last else set())
            last[stream] = operation
            way = (rank, peer) if kind == 'send' else (peer, rank)
            ways[kind, *way, group].append(operation)
    pairs = [
        pair
        for (kind, *way), sends in ways.items()
        if kind == 'send'
        for pair in zip(sends, ways['receive', *way], strict=True)
    ]
    over: set[Operation] = set()
    while ready := [pair for pair in pairs if all(before[one] <= over for one in pair)]:
        over.update(*ready)
        pairs = [pair for pair in pairs if pair not in ready]
    return not pairs


@pytest.mark.parametrize('stages', [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_stages_finish_after_a_recovery(stages: int) -> None:
    found = orders(stages, flush=False)
    assert all_finish(found, reconnected=False) and all_finish(found, reconnected=True)


@pytest.mark.thorough
def test_stages_with_a_flushed_warm_up_deadlock_after_a_recovery() -> None:
    """Hence the rule of whole-job recovery, which can go when this test fails."""
    found = orders(4, flush=True)
    assert all_finish(found, reconnected=False)
    assert not all_finish(found, reconnected=True)
