# SPDX-License-Identifier: Apache-2.0
r"""A training loop on plain torch that survives failures: no Megatron, a hand-written pipeline.

    moevement launch --nodes 3 --spares 1 --kill 1@12 -- \
        examples/pipeline_loop.py --text README.md --iterations 40

Each rank is a stage of a small language model with a Mixture of Experts; micro-batches pass forward
through the stages, then all pass backward. Recovery uses the loop through `PipelineTrainer`.
"""

import argparse
import math
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from moevement_ext import Direction, Job, SparseCheckpointConfig, TorchTrainer

MOEVEMENT_SPARES = True  # a hot spare may import this program in advance
_HIDDEN, _EXPERTS, _VOCABULARY = 32, 4, 256
_SEQUENCE, _SAMPLES, _MICRO_BATCHES, _CLIP = 24, 2, 4, 0.5
_SHAPE = (_SAMPLES, _SEQUENCE, _HIDDEN)


class Stage(nn.Module):
    """Layers of one pipeline stage; the first has the embedding, the last the head."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _HIDDEN) if stage == 0 else None
        self.mixing = nn.Linear(_HIDDEN, _HIDDEN)
        self.dropout = nn.Dropout(0.1)
        self.router = nn.Linear(_HIDDEN, _EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(_HIDDEN, 48), nn.GELU(), nn.Linear(48, _HIDDEN))
            for _ in range(_EXPERTS)
        )
        self.head = nn.Linear(_HIDDEN, _VOCABULARY, bias=False) if stage == stages - 1 else None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Map tokens, or hidden states of the previous stage, to hidden states or logits."""
        hidden = given if self.embedding is None else self.embedding(given)
        before = hidden.cumsum(dim=1) / torch.arange(1, hidden.shape[1] + 1).unsqueeze(-1)
        hidden = hidden + self.dropout(self.mixing(before).tanh())
        probability, choice = self.router(hidden).softmax(dim=-1).max(dim=-1)
        result = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):  # each token is routed to one of them
            mine = choice == index
            result[mine] = expert(hidden[mine]) * probability[mine].unsqueeze(-1)
        hidden = hidden + result
        return hidden if self.head is None else nn.functional.linear(hidden, self.head.weight)


class PipelineTrainer(TorchTrainer):
    """One stage of the pipeline."""

    def __init__(self, job: Job, stages: int, text: torch.Tensor, last_iteration: int) -> None:
        stage = job.rank.number
        for seed in (random.seed, np.random.seed, torch.manual_seed):  # all are part of the state
            seed(1234 + stage)
        model = Stage(stage, stages)
        adam = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
        largest = 4 * math.prod(_SHAPE)
        super().__init__(job, model, adam, last_iteration, stages, _MICRO_BATCHES, largest)
        self._text, self._is_last = text, stage == stages - 1

    def compute(self, iteration: int) -> float | None:
        """Run all micro-batches forward, then all backward; return the loss (last stage)."""
        passes = [self._forward(iteration, index) for index in range(_MICRO_BATCHES)]
        for given, result in passes:
            self._backward(given, result)
        losses = [float(result.detach()) for _, result in passes] if self._is_last else []
        return sum(losses) / _MICRO_BATCHES if losses else None

    def reduce(self) -> list[float]:
        """Gradient norm over all stages, which a stage cannot compute alone in a replay."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        dist.all_reduce(square := torch.stack([g.double().square().sum() for g in gradients]).sum())
        return [float(square.sqrt())]

    def update(self, reduced: list[float]) -> None:
        """Clip and step; parameters without a gradient belong to frozen operators."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= min(1.0, _CLIP / reduced[0])
        self.optimizer.step()

    def _batch(self, iteration: int, index: int) -> torch.Tensor:
        """Tokens [samples, sequence + 1]; a pure function of its arguments."""
        first = (iteration * _MICRO_BATCHES + index) * _SAMPLES * _SEQUENCE
        room = len(self._text) - _SEQUENCE - 1
        starts = [(first + n * _SEQUENCE) % room for n in range(_SAMPLES)]
        return torch.stack([self._text[start : start + _SEQUENCE + 1] for start in starts]).long()

    def _forward(self, iteration: int, index: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        tokens = self._batch(iteration, index)
        receive = self.pipeline.receive
        given = receive(Direction.DOWN, _SHAPE).requires_grad_() if self.stage else None
        result = self.model(tokens[:, :-1] if given is None else given)
        if self._is_last:
            target = tokens[:, 1:].reshape(-1)
            return given, nn.functional.cross_entropy(result.reshape(-1, _VOCABULARY), target)
        self.pipeline.send(Direction.DOWN, result.detach())
        return given, result

    def _backward(self, given: torch.Tensor | None, result: torch.Tensor) -> None:
        if self._is_last:
            (result / _MICRO_BATCHES).backward()
        else:
            gradient = self.pipeline.receive(Direction.UP, _SHAPE)
            if result.requires_grad:  # else the whole stage is frozen
                result.backward(gradient)
        if given is not None and given.grad is not None:
            self.pipeline.send(Direction.UP, given.grad)


def main() -> None:
    """Train; the lines with `job` add protection."""
    parser = argparse.ArgumentParser(prog='pipeline_loop', description=__doc__)
    parser.add_argument('--text', type=argparse.FileType('rb'), required=True)
    parser.add_argument('--iterations', type=int, default=40)
    parser.add_argument('--dir', default=SparseCheckpointConfig.dir, help='for windows, in a tmpfs')
    parser.add_argument('--run-id', default='pipeline', help='name; give the same one to resume')
    parser.add_argument('--events', metavar='DIR', help='write events as JSON lines')
    parser.add_argument('--digest', metavar='FILE', help='write digests of the state')
    given = parser.parse_args()
    text = torch.frombuffer(bytearray(given.text.read()), dtype=torch.uint8)
    stages, last = int(os.environ['WORLD_SIZE']), given.iterations
    config = SparseCheckpointConfig(
        window=3, replicas=1, dir=given.dir, run_id=given.run_id, events=given.events
    )
    with Job.join(config, {'text': given.text.name, 'iterations': last}, backend='gloo') as job:
        job.set_up(lambda load: PipelineTrainer(job, stages, text, last), last_iteration=last)

        def loop() -> None:  # called again after a failure of other ranks
            while job.iteration < last:
                loss = job.step()
                if loss is not None:
                    print(f' iteration {job.iteration}/{last} | lm loss: {loss:.6E} |', flush=True)

        job.train(loop)
        if given.digest is not None:
            job.write_digest(given.digest)


if __name__ == '__main__':
    main()
