# SPDX-License-Identifier: Apache-2.0
r"""A data-parallel training loop on plain torch that survives failures.

    moevement launch --nodes 3 --spares 1 --kill 1@12 -- \
        examples/data_parallel_loop.py --text README.md --iterations 40

All ranks hold the same model, which predicts the next byte of a text, and compute on different
parts of the text. The state of a lost rank is copied from another rank.
"""

import argparse
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from moevement_ext import Job, SparseCheckpointConfig, TorchTrainer

MOEVEMENT_SPARES = True  # a hot spare may import this program in advance
_CONTEXT, _SAMPLES, _CLIP = 8, 4, 0.5


class Trainer(TorchTrainer):
    """One rank of the loop."""

    copies_from_peers = True  # dropout draws equally many numbers on all ranks

    def __init__(self, job: Job, text: torch.Tensor, last_iteration: int) -> None:
        for seed in (random.seed, np.random.seed, torch.manual_seed):  # equal on all ranks
            seed(1234)
        hidden = nn.Sequential(nn.Linear(16 * _CONTEXT, 64), nn.GELU(), nn.Dropout(0.1))
        model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), hidden, nn.Linear(64, 256))
        adam = torch.optim.Adam(model.parameters(), lr=1e-2)
        self._schedule = torch.optim.lr_scheduler.ExponentialLR(adam, 0.95)
        self._text = text
        super().__init__(job, model, adam, last_iteration)

    def compute(self, iteration: int) -> float:
        """Forward and backward on this rank's samples; average the gradients."""
        first = (iteration * dist.get_world_size() + dist.get_rank()) * _SAMPLES
        starts = [(first + n) % (len(self._text) - _CONTEXT - 1) for n in range(_SAMPLES)]
        rows = torch.stack([self._text[start : start + _CONTEXT + 1] for start in starts]).long()
        loss = nn.functional.cross_entropy(self.model(rows[:, :-1]), rows[:, -1])
        loss.backward()
        for parameter in self.model.parameters():
            if parameter.grad is not None:  # else its operator is frozen, in a replay
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        return float(loss.detach())

    def reduce(self) -> list[float]:
        """Gradient norm; in a replay the gradients of frozen operators are missing."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [float(torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt())]

    def update(self, reduced: list[float]) -> None:
        """Clip and step."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= min(1.0, _CLIP / reduced[0])
        self.optimizer.step()
        self._schedule.step()

    def evaluate(self, iteration: int) -> None:
        """Mean loss of all ranks on a part of the text for each."""
        self.model.eval()
        start = dist.get_rank() * _SAMPLES
        rows = torch.stack([self._text[start + n : start + n + _CONTEXT + 1] for n in range(32)])
        with torch.no_grad():
            logits = self.model(rows[:, :-1].long())
            loss = nn.functional.cross_entropy(logits, rows[:, -1].long())
        self.model.train()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            mean = float(loss) / dist.get_world_size()
            print(f' evaluation at iteration {iteration} | loss: {mean:.6E} |', flush=True)

    def save(self, path: Path, iteration: int) -> None:
        """Write the model on one rank, whole or not at all; the others wait for it."""
        if dist.get_rank() == 0:
            torch.save({'iteration': iteration, 'model': self.model.state_dict()}, f'{path}.new')
            Path(f'{path}.new').replace(path)
        dist.barrier()

    def state_dict(self) -> dict[str, Any]:
        return self._schedule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._schedule.load_state_dict(state)


def main() -> None:
    """Train; the lines with `job` add protection."""
    parser = argparse.ArgumentParser(prog='data_parallel_loop', description=__doc__)
    parser.add_argument('--text', type=argparse.FileType('rb'), required=True)
    parser.add_argument('--iterations', type=int, default=40)
    parser.add_argument('--dir', default=SparseCheckpointConfig.dir, help='for windows, in a tmpfs')
    parser.add_argument('--run-id', help='name of the run; give the same one to resume')
    parser.add_argument('--events', metavar='DIR', help='write events as JSON lines')
    parser.add_argument('--eval-interval', type=int, default=10, help='iterations')
    parser.add_argument('--save', type=Path, metavar='FILE', help='save the model every 20 of them')
    parser.add_argument('--digest', metavar='FILE', help='write digests of the state')
    given = parser.parse_args()
    text, last = torch.frombuffer(bytearray(given.text.read()), dtype=torch.uint8), given.iterations
    config = SparseCheckpointConfig(
        window=3, dir=given.dir, run_id=given.run_id, events=given.events
    )
    with Job.join(config, {'text': given.text.name, 'iterations': last}, backend='gloo') as job:

        def build(load: bool) -> Trainer:
            trainer = Trainer(job, text, last)
            job.after_step(given.eval_interval, trainer.evaluate)
            if given.save is not None:
                job.after_step(20, partial(trainer.save, given.save))
            return trainer

        job.set_up(build, last_iteration=last)

        def loop() -> None:  # called again after a failure of other ranks
            while job.iteration < last:
                loss = job.step()
                if dist.get_rank() == dist.get_world_size() - 1:  # as Megatron does
                    print(f' iteration {job.iteration}/{last} | lm loss: {loss:.6E} |', flush=True)

        job.train(loop)
        if given.digest is not None:
            job.write_digest(given.digest)


if __name__ == '__main__':
    main()
