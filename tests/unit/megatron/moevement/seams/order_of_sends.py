# SPDX-License-Identifier: Apache-2.0
"""What each stage of an interleaved schedule sends, receives and waits for, in its order.

    order_of_sends.py <stages> <micro-batches> [flush]

Prints a list for each stage: [number, kind, peer, group] of an operation, [number] of a wait for
one. Upstream's own schedule runs for one stage after the other, over fake process groups.
"""

import json
import os
import sys
from typing import Any

from megatron.moevement.seams import cpu_device

cpu_device.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

CHUNKS = 2
SHAPE = (4, 1, 8)


class Chunk(torch.nn.Module):
    """A model chunk of a stage."""

    model_type = ModelType.encoder_or_decoder
    share_embeddings_and_output_weights = False

    def __init__(self, config: TransformerConfig, number: int) -> None:
        super().__init__()
        self.config, self.vp_stage = config, number
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.set_input_tensor(None)

    def set_input_tensor(self, tensors: Any) -> None:
        self.input = tensors[0] if isinstance(tensors, list) else tensors

    def forward(self) -> torch.Tensor:
        return self.weight * (torch.ones(SHAPE) if self.input is None else self.input)


def order(stage: int, stages: int, micro_batches: int, flush: bool) -> list[list[Any]]:
    """Run the schedule of one stage."""
    found: list[list[Any]] = []

    class Request:
        def __init__(self) -> None:
            self.number = sum(len(entry) > 1 for entry in found)

        def wait(self) -> None:
            found.append([self.number])

    def noted(kind: str, peer: int, group: Any) -> Request:
        request = Request()
        name = 'world' if group is dist.group.WORLD else 'pipeline'
        found.append([request.number, kind, peer, name])
        return request

    dist.isend = lambda tensor, dst, group: noted('send', dst, group)
    dist.irecv = lambda tensor, src, group: noted('receive', src, group)
    dist.init_process_group('fake', rank=stage, world_size=stages, store=FakeStore())
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=CHUNKS
    )
    config = TransformerConfig(
        num_layers=stages * CHUNKS,
        hidden_size=SHAPE[-1],
        num_attention_heads=1,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=CHUNKS,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=True,
        batch_p2p_comm=False,
        overlap_p2p_comm_warmup_flush=flush,
    )
    get_forward_backward_func()(
        forward_step_func=lambda data, chunk, *_: (chunk(), lambda out: (out.sum(), {})),
        data_iterator=[iter([])] * CHUNKS,
        model=[Chunk(config, number) for number in range(CHUNKS)],
        num_microbatches=micro_batches,
        seq_length=SHAPE[0],
        micro_batch_size=SHAPE[1],
    )
    return found


def main(stages: str, micro_batches: str, flush: str = '') -> None:
    for stage in range(int(stages)):
        child = os.fork()
        if not child:
            print(
                json.dumps(order(stage, int(stages), int(micro_batches), bool(flush))), flush=True
            )
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == '__main__':
    main(*sys.argv[1:])
