# SPDX-License-Identifier: Apache-2.0
"""One rank of a loop on plain torch, through the recovery interface."""

import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from moevement_ext.config import ConfigurationError
from moevement_ext.job.torch_loop.torch_trainer import TorchTrainer
from moevement_ext.memory.upstream_log.record import Direction
from moevement_ext.recover.trainer import PlainLoop


def job(rank: int = 0, ranks: int = 1) -> Any:
    return SimpleNamespace(
        rank=SimpleNamespace(number=rank, world_size=ranks), after_steps=PlainLoop()
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(2, 2)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)])
        self.norm = nn.BatchNorm1d(2)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.norm(self.router(given)) + sum(expert(given) for expert in self.experts)


class Trainer(TorchTrainer):
    def __init__(self, own: Any, **how: int) -> None:
        torch.manual_seed(3)
        model = Net()
        adam = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(adam, 0.5)
        self.asked: list[Any] = []
        self.numbers = [0.5]
        super().__init__(own, model, adam, last_iteration=9, **how)
        self.around_update(*(lambda *given, at=at: self.asked.append((at, *given)) for at in 'abc'))

    def compute(self, iteration: int) -> float:
        self.asked.append(iteration)
        loss = self.model(torch.rand(4, 2)).square().mean()
        loss.backward()
        return float(loss.detach())

    def reduce(self) -> list[float]:
        self.asked.append('reduce')
        return self.numbers

    def update(self, reduced: list[float]) -> bool | None:
        self.asked.append(reduced)
        self.optimizer.step()
        self.schedule.step()
        return None

    def state_dict(self) -> Any:
        return self.schedule.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.schedule.load_state_dict(state)

    def everything(self) -> list[bytes]:
        slices = [item for held in self.operators.slices.values() for item in held.full]
        return [self.auxiliary_state.now(), *(item.source.numpy().tobytes() for item in slices)]


def test_iteration_computes_reduces_and_updates() -> None:
    trainer = Trainer(job())
    trainer.iterate(0)
    assert trainer.asked == [0, ('a',), 'reduce', ('b',), [0.5], ('c', False)]
    assert trainer.iteration == 1
    state, entry, _ = trainer.record(1, skipped=False)
    assert (entry.iteration, entry.grad_norms, entry.loss) == (1, [0.5], trainer.loss)
    assert state == trainer.auxiliary_state.now()


def test_replay_uses_the_recorded_reduced_numbers() -> None:
    trainer = Trainer(job())
    trainer.iterate(0)
    state, entry, _ = trainer.record(1, skipped=False)
    for known in (entry, state):
        trainer.asked.clear()
        with trainer.reduced(known):
            trainer.iterate(0)
        assert trainer.asked == [0, ('a',), ('b',), [0.5], ('c', False)]
    trainer.iterate(1)
    assert 'reduce' in trainer.asked


def test_undo_removes_a_broken_iteration() -> None:
    trainer = Trainer(job())
    trainer.iterate(0)
    state = trainer.record(1, skipped=False).state
    before = trainer.everything()
    assert trainer.begin_iteration(1) == state
    trainer.compute(1)  # changes buffers and random numbers
    assert trainer.everything() != before
    trainer.undo_broken_iteration(state, began=True)
    assert trainer.everything() == before


def test_renewal_finds_the_tensors_of_a_loaded_optimizer() -> None:
    trainer = Trainer(job())
    trainer.optimizer.load_state_dict(deepcopy(trainer.optimizer.state_dict()))
    trainer.operators.renew()
    trainer.begin_iteration(0)
    trainer.iterate(0)
    held = {(item.tensor, item.part): item.source for item in trainer.operators._all()}
    for name, parameter in trainer.model.named_parameters():
        state = trainer.optimizer.state[parameter]
        assert {*state} == {'step', 'exp_avg', 'exp_avg_sq'}
        for part, value in state.items():
            assert torch.equal(held[name, part], value.view(-1))


def loads_the_optimizer(trainer: Trainer) -> None:
    trainer.optimizer.load_state_dict(deepcopy(trainer.optimizer.state_dict()))


def replaces_a_buffer(trainer: Trainer) -> None:
    trainer.model.norm.running_mean = trainer.model.norm.running_mean + 1


def replaces_the_data_of_a_parameter(trainer: Trainer) -> None:
    trainer.model.router.bias.data = torch.ones(2)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (loads_the_optimizer, r'experts\.0\.0\.bias \(exp_avg\) is another tensor'),
        (replaces_a_buffer, r'norm\.running_mean \(buffer\) is another tensor'),
        (replaces_the_data_of_a_parameter, r'router\.bias \(weight\) is another tensor'),
    ],
)
def test_iteration_refuses_other_tensors_than_windows_hold(
    change: Callable[[Trainer], None], message: str
) -> None:
    trainer = Trainer(job())
    trainer.begin_iteration(0)
    trainer.iterate(0)
    trainer.begin_iteration(1)
    change(trainer)
    with pytest.raises(ConfigurationError, match=message):
        trainer.begin_iteration(1)


def modes(trainer: Trainer) -> list[bool]:
    return [module.training for module in trainer.model.modules()]


@pytest.mark.parametrize('replays', [True, False])
def test_interrupted_evaluation_leaves_no_module_in_its_mode(replays: bool) -> None:
    trainer = Trainer(job())
    trainer.model.experts[1].eval()
    expected = modes(trainer)
    state = trainer.begin_iteration(0)
    trainer.model.eval()
    if replays:
        with trainer.replaying():
            assert modes(trainer) == expected
    else:
        trainer.undo_broken_iteration(state, began=False)
        assert modes(trainer) == expected


def test_new_process_restores_schedule_and_learning_rate() -> None:
    trainer, fresh = Trainer(job()), Trainer(job())
    trainer.iterate(0)
    state = trainer.record(1, skipped=False).state
    for item, other in zip(trainer.operators._all(), fresh.operators._all(), strict=True):
        other.source.copy_(item.source)
    fresh.auxiliary_state.restore(state)
    assert fresh.optimizer.param_groups[0]['lr'] == 0.05
    assert isinstance(fresh.optimizer.param_groups[0]['betas'], tuple)
    for one in (trainer, fresh):
        one.begin_iteration(1)
        one.iterate(1)
    assert fresh.everything() == trainer.everything()


@pytest.mark.parametrize(
    ('rank', 'before', 'after', 'sends'),
    [(0, None, 2, 1), (3, 1, 5, 2), (5, 3, None, 1)],
)
def test_pipeline_neighbours_have_the_same_index_in_their_stages(
    rank: int, before: int | None, after: int | None, sends: int
) -> None:
    how = {'stages': 3, 'micro_batches': 4, 'boundary_bytes': 64}
    pipeline = Trainer(job(rank, ranks=6), **how).pipeline
    assert pipeline.neighbours == {Direction.DOWN: before, Direction.UP: after}
    assert pipeline.logged.iteration_bytes == 4 * sends * pipeline.logged.record_bytes


def with_too_many_numbers() -> None:
    trainer = Trainer(job())
    trainer.numbers = [0.0] * 17
    trainer.iterate(0)


class Sends(Trainer):
    """A first stage that sends `tensors`, of one number each."""

    tensors = 2

    def compute(self, iteration: int) -> float:
        with self.pipeline.replaying({Direction.UP: Ones()}):  # without another rank
            for _ in range(self.tensors):
                self.pipeline.send(Direction.DOWN, torch.ones(1))
            self.pipeline.receive(Direction.UP, (1,))
        return 0.0


class Ones:
    def take(self, iteration: int, sequence: int) -> torch.Tensor:
        return torch.ones(1)


def with_two_tensors_per_micro_batch() -> None:
    Sends(job(ranks=2), stages=2, boundary_bytes=4).iterate(0)


def with_a_larger_tensor() -> None:
    Sends(job(ranks=2), stages=2).iterate(0)


def test_iteration_with_one_tensor_per_micro_batch_is_accepted() -> None:
    stage = Sends(job(ranks=2), stages=2, boundary_bytes=4)
    stage.tensors = 1
    for iteration in range(2):
        stage.iterate(iteration)


@pytest.mark.parametrize(
    ('build', 'message'),
    [
        (with_two_tensors_per_micro_batch, 'received 1 .* and sent it 2, with micro_batches=1'),
        (with_a_larger_tensor, 'was given 4 bytes, more than boundary_bytes=0'),
        (with_too_many_numbers, 'returned 17 numbers; at most 16'),
        (lambda: Trainer(job(ranks=4), stages=3), '4 ranks are no multiple of 3 stages'),
    ],
)
def test_unrecoverable_trainer_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build()


def test_optimizer_imports_nothing_that_a_spare_had_not_imported() -> None:
    """Else each replacement of a lost worker takes seconds of CPU time for it."""
    program = (
        'import sys, torch; from moevement_ext import TorchTrainer; before = set(sys.modules); '
        'torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]); '
        'print(len(set(sys.modules) - before))'
    )
    ended = subprocess.run([sys.executable, '-c', program], capture_output=True, check=True)
    assert int(ended.stdout) < 20
