# SPDX-License-Identifier: Apache-2.0
"""How a job came back all of whose workers were killed, phase by phase."""

from collections.abc import Sequence

import msgspec

from moevement_ext.events import Event, NextTier, Recovered, WorkerStarted
from tools.lab.errors import LabError
from tools.lab.evidence import kind_of, ranks_with
from tools.lab.run_log import Iteration, RunLog


class Restart(msgspec.Struct, frozen=True):
    """One job that was killed and came back."""

    seconds: float
    """From the kill to the first new iteration."""
    phases: dict[str, float]
    """Seconds, in order; they add up to `seconds`."""
    recomputed: int
    """Iterations that were computed a second time."""
    died_after: int
    """The last iteration logged before the kill."""
    different: list[str]
    """Kinds of state that do not equal those of the undisturbed run."""


def first_new_iteration(log: RunLog) -> Iteration:
    """The first iteration beyond those that the first life had logged.

    Raises:
        LabError: there is none.
    """
    died_after = log.lives[0][-1].number
    for iteration in log.lives[1]:
        if iteration.number > died_after:
            return iteration
    raise LabError(f'the job never got beyond iteration {died_after}, where it was killed')


def dense_restart(log: RunLog, killed_at: float, different: list[str]) -> Restart:
    """Phases out of the log: the restart with the load, recomputation, the first new iteration."""
    first, new = log.lives[1][0], first_new_iteration(log)
    died_after = log.lives[0][-1].number
    training_at = first.time - first.elapsed_ms / 1000
    caught_up_at = max(
        [item.time for item in log.lives[1] if item.number <= died_after], default=training_at
    )
    phases = {
        'process start, load': training_at - killed_at,
        'recompute': caught_up_at - training_at,
        'new iteration': new.time - caught_up_at,
    }
    recomputed = died_after - first.number + 1
    return Restart(new.time - killed_at, phases, recomputed, died_after, different)


def sparse_restart(
    log: RunLog,
    killed_at: float,
    events: Sequence[Event],
    ranks: int,
    different: list[str],
) -> Restart:
    """Phases out of the events of the slowest rank.

    Raises:
        LabError: a rank did not recover from host memory.
    """
    slowest = _slowest(events, ranks)
    started_at = max(event.time for event in kind_of(events, WorkerStarted))
    new = first_new_iteration(log)
    steps = slowest.seconds
    start = started_at - killed_at
    phases = {
        'process start': start,
        'set-up': slowest.time - started_at - sum(steps.values()),
        **{name.replace('_', ' '): value for name, value in steps.items()},
        'new iteration': new.time - slowest.time,
    }
    died_after = log.lives[0][-1].number
    return Restart(new.time - killed_at, phases, slowest.replayed, died_after, different)


def _slowest(events: Sequence[Event], ranks: int) -> Recovered:
    """Report of the rank that was back last.

    Raises:
        LabError: a rank did not recover from host memory.
    """
    fallen_back = kind_of(events, NextTier)
    if fallen_back:
        raise LabError(f'host memory was not used: {fallen_back[0].reason}')
    missing = set(range(ranks)) - ranks_with(events, Recovered)
    if missing:
        raise LabError(f'ranks {sorted(missing)} did not report a recovery')
    return kind_of(events, Recovered)[-1]
