# SPDX-License-Identifier: Apache-2.0
"""`Job.join` and the end of a job with one real rank: windows stay until the last iteration."""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.megatron.moevement.attached import Raised, run
from tests.unit.memory.samples import tmpfs_directory

LAST = 8
SETTINGS = {'lr': 0.1}


def trains(
    directory: Path,
    stop_at: int = LAST,
    error: str = '',
    buffers: int = 0,
    dense: int = -1,
    loaded: int | None = None,
) -> tuple[int, str]:
    """Return the first iteration and the digest of the final state."""
    import json

    import torch
    from torch import nn

    from moevement_ext import Job, SparseCheckpointConfig, TorchTrainer

    class Trainer(TorchTrainer):
        def compute(self, iteration: int) -> float:
            loss = self.model(torch.rand(4, 2)).square().mean()
            loss.backward()
            return float(loss.detach())

        def update(self, reduced: list[float]) -> None:
            self.optimizer.step()

    def build(with_dense: bool) -> Trainer:
        import random

        import numpy as np

        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for index in range(buffers):
            model.register_buffer(f'more{index}', torch.zeros(1))
        trainer = Trainer(job, model, torch.optim.Adam(model.parameters()), LAST)
        if with_dense and loaded is not None:
            load(trainer)
        return trainer

    def load(trainer: Any) -> None:
        """As from a checkpoint: the optimizer gets other tensors."""
        trainer.optimizer.load_state_dict(deepcopy(trainer.optimizer.state_dict()))
        trainer.iteration = loaded

    config = SparseCheckpointConfig(
        window=2, replicas=0, dir=str(directory / 'memory'), run_id='run', interface='lo'
    )
    begins: list[int] = []

    def loop() -> None:
        while job.iteration < stop_at:
            begins.append(job.iteration)
            job.step()
            torch.rand(1)  # outside of training
            if error and job.iteration == stop_at:
                raise RuntimeError(error)

    digest = directory / 'digest.json'
    with Job.join(config, SETTINGS, backend='gloo') as job:
        again = None if loaded is None else lambda: load(job.trainer)
        job.set_up(build, again, dense, LAST)
        job.train(loop)
        job.write_digest(str(digest))
    return begins[0], json.loads(digest.read_text())['digest']


@pytest.fixture
def directory() -> Iterator[Path]:
    with tmpfs_directory() as path:
        yield path


def kept(directory: Path) -> bool:
    return any((directory / 'memory').rglob('*.window'))


def test_job_that_ends_early_resumes_with_the_same_bits(directory: Path) -> None:
    expected = run(trains, directory / 'whole')[1]
    run(partial(trains, stop_at=5), directory)
    assert kept(directory)
    begins, digest = run(trains, directory)
    assert begins > 0
    assert digest == expected
    assert not kept(directory)


def test_error_of_the_loop_ends_the_program_and_keeps_windows(directory: Path) -> None:
    with pytest.raises(Raised, match='RuntimeError: not finite'):
        run(partial(trains, stop_at=5, error='not finite'), directory)
    assert kept(directory)
    assert run(trains, directory)[0] > 0


def test_step_after_the_last_iteration_is_refused(directory: Path) -> None:
    with pytest.raises(Raised, match='ConfigurationError: job.step .* after its last iteration'):
        run(partial(trains, stop_at=LAST + 1), directory)


def test_checkpoint_is_loaded_if_windows_do_not_fit(directory: Path) -> None:
    run(partial(trains, stop_at=5), directory)
    assert run(partial(trains, buffers=1, dense=1, loaded=1), directory)[0] == 1


@pytest.mark.parametrize(
    ('scenario', 'message'),
    [
        (partial(trains, dense=3), 'dense_iteration=3 without load_dense'),
        (
            partial(trains, dense=3, loaded=0),
            'dense_iteration=3, but training would begin at iteration 0',
        ),
    ],
)
def test_checkpoint_that_is_not_loaded_is_refused(
    scenario: Any, message: str, directory: Path
) -> None:
    with pytest.raises(Raised, match=f'ConfigurationError: .*{message}'):
        run(scenario, directory)
