# SPDX-License-Identifier: Apache-2.0
"""Jobs that train the same model in several ways, and comparisons of their final states."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moevement_ext.events import ProtectionReduced
from tests.gpu.jobs.findings import Settings
from tools.lab import evidence
from tools.lab.job import Trained, memory_directory, train
from tools.lab.launch import PROGRAM, Launch, Launcher
from tools.lab.models import sparse_flags

_MAX_RESTARTS = 3
# Iterations at the start that are not timed.
_WARM_UP = 3


class Kill(NamedTuple):
    rank: int
    after: int
    """Iteration after which the worker is killed."""


class Trials(NamedTuple):
    """Jobs with the same model.

    Raises:
        LabError: (all methods) a job failed.
    """

    settings: Settings
    folder: Path
    """Folder of logs and states."""
    flags: Sequence[str]
    """Megatron's flags for the model and its training."""
    nodes: int
    """Number of emulated nodes, with one rank each."""
    window: int | str
    """W, or `auto`."""
    program_file: str = PROGRAM
    """Path of the training program."""
    variables: Mapping[str, str] = {}
    """Additional environment variables of the jobs."""
    launcher: Launcher = Launcher.LOCAL

    def plain(self, name: str) -> Trained:
        return self._train(name, [], None)

    def protected(self, name: str, kill: Kill | None = None) -> Trained:
        """Run with windows; with `kill`, one worker is killed and replaced."""
        with memory_directory('moevement-check-', self.settings.memory) as memory:
            events = self.folder / name / 'events'
            return self._train(name, sparse_flags(memory, name, self.window, events), kill)

    def _train(self, name: str, protection: list[str], kill: Kill | None) -> Trained:
        print(f'-- {name}', flush=True)
        launch = Launch(
            self.folder / name,
            [*self.flags, *protection],
            self.nodes,
            1,
            max_restarts=_MAX_RESTARTS if kill else 0,
            spares=int(not self.settings.gpu),
            share_gpu=self.settings.gpu,
            program_file=self.program_file,
            variables=self.variables,
        )
        hurt = kill and (lambda job: job.kill_after(kill.after, [kill.rank]))
        return train(launch, hurt, self.launcher)


def compare(expected: Trained, other: Trained, what: str) -> list[str]:
    """Problems in the final state of a job that differs only in `what`; empty if equal."""
    kinds = other.different(expected)
    return [f'{what}: the final state differs in {", ".join(kinds)}'] if kinds else []


def reduced(trained: Trained) -> list[str]:
    """Reasons for reduced protection of a job."""
    found = evidence.kind_of(trained.events, ProtectionReduced)
    return sorted({f'protection was reduced: {event.reason}' for event in found})


def iteration_ms(trained: Trained) -> float:
    """Median over the last attempt of the job."""
    times = [iteration.elapsed_ms for iteration in trained.log.attempts[-1]]
    return statistics.median(times[_WARM_UP:] or times)


def costs(plain: Trained, windows: Trained) -> dict[str, Any]:
    """Median costs of windows per iteration, from the log."""
    exposed = [captured.exposed_ms for captured in windows.log.captured]
    plain_ms, windows_ms = iteration_ms(plain), iteration_ms(windows)
    return {
        'plain_ms': plain_ms,
        'windows_ms': windows_ms,
        'windows_over_plain': windows_ms / plain_ms,
        'exposed_ms': statistics.median(exposed[_WARM_UP:] or exposed),
    }
