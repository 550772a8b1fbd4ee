# SPDX-License-Identifier: Apache-2.0
"""A loop of one rank that `attach` protects, in its own process: Megatron-Core on gloo."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from moevement_ext.system.leaving import leave
from tests.distributed.harness.ports import free_port
from tests.support.forks import PROGRAM

_CONTEXT = multiprocessing.get_context('forkserver')
_CONTEXT.set_forkserver_preload([PROGRAM])
_SECONDS = 300.0
_SAMPLES = 4


@dataclass
class OwnLoop:
    """The job, the built model and the plan of a scenario."""

    job: Any
    built: tuple[list[Any], Any, Any]
    plan: Any

    def train_step(self, data: Any, **schedule: Any) -> float | None:
        from examples import small_gpt

        return small_gpt.train_step(self.built, self.plan, data, **schedule)

    def train(self, stop_at: int | None = None) -> None:
        """Train from the current iteration to the end, or to `stop_at`."""

        def loop() -> None:
            while self.job.iteration < (stop_at or self.plan.train_iters):
                self.job.step(self.train_step)

        self.job.train(loop, batches)


def batches(consumed_samples: int) -> Iterator[torch.Tensor]:
    """Micro-batches of two samples; the random numbers are a function of the position."""
    from examples import small_gpt

    while True:
        generator = torch.Generator().manual_seed(consumed_samples)
        yield torch.randint(512, (2, small_gpt.SEQUENCE + 1), generator=generator)
        consumed_samples += 2


@contextmanager
def attached(
    directory: Path,
    iterations: int = 6,
    connect: Callable[[Any], None] = lambda job: job.init_process_group(),
    change: Callable[..., Any] = lambda *built: built,
    load_own: Mapping[str, Any] = {},
    settings: Mapping[str, object] = {},
) -> Iterator[OwnLoop]:
    """A loop that is set up, with windows of two iterations. Needs its own process.

    Args:
        directory: for its windows and events.
        iterations: to train.
        connect: called with the job before the set-up.
        change: returns what the loop builds, given what the example builds.
        load_own: keywords of `set_up` about the loop's own checkpoint.
        settings: of the loop, by name.
    """
    from examples import small_gpt
    from megatron.moevement import SparseCheckpointConfig, TrainingPlan, attach

    configurations = small_gpt.configurations(1)
    plan = TrainingPlan(
        iterations,
        seq_length=small_gpt.SEQUENCE,
        micro_batch_size=2,
        global_batch_size=_SAMPLES,
        backend='gloo',
    )
    sparse = SparseCheckpointConfig(
        window=2,
        replicas=0,
        dir=str(directory / 'memory'),
        run_id='run',
        events=str(directory / 'events'),
        interface='lo',
    )
    with attach(sparse, *configurations, plan, settings) as job:
        connect(job)
        built = job.set_up(lambda: change(*small_gpt.build(*configurations)), **load_own)
        yield OwnLoop(job, built, plan)


def run(scenario: Callable[[Path], Any], directory: Path) -> Any:
    """Return `scenario(directory)`, run in a process that is the only rank of a job.

    Raises:
        Raised: the exception of the scenario.
    """
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_child, args=(scenario, directory, sender))
    process.start()
    sender.close()
    try:
        assert receiver.poll(_SECONDS), 'it does not end'
        error, result = receiver.recv()
        if error is None:
            process.join(_SECONDS)
    finally:
        process.kill()
        process.join()
    if error is not None:
        raise Raised(error)
    return result


class Raised(Exception):
    """The exception of a scenario: type and message."""


def _child(scenario: Callable[[Path], Any], directory: Path, sender: Connection) -> None:
    os.environ.pop('TORCHELASTIC_USE_AGENT_STORE', None)
    os.environ |= {
        'RANK': '0',
        'WORLD_SIZE': '1',
        'LOCAL_RANK': '0',
        'MASTER_ADDR': '127.0.0.1',
        'MASTER_PORT': str(free_port()),
    }
    try:
        sender.send((None, scenario(directory)))
    except BaseException as error:  # passed to the parent process
        sender.send((f'{type(error).__name__}: {error}', None))
    else:
        leave(0)  # as a program's last line does
