# SPDX-License-Identifier: Apache-2.0
"""Predicts the ETTR of a job by the simulator, from the profile of that job and its faults.

The profile has the job's speed between checkpoints, its rates of copies and sends, and the time
from a failure until state can be loaded. Stalls, lost and repeated iterations, loading and replays
are the simulator's own.
"""

import math
import statistics

import numpy as np
from msgspec.structs import replace

from moevement_ext.plan.byte_planner import InfeasiblePlan

from ..lab import four_ranks
from ..model.description import DescriptionError
from ..model.fields import FieldError
from ..simulate import profile as profiles
from ..simulate.failures import Trace
from ..simulate.monte_carlo import simulate
from ..simulate.systems import Options, System, build
from . import measuring
from .measuring import PHASES, Comeback
from .rows import Keeps, Row
from .running import MICRO_BATCHES, RANKS, Lived

_HISTORIES = 2  # the first one has the faults of the job
# Rates that events may lack: without replicas nothing uses or measures the network; the disk's rate
# is the default of --sparse-ckpt-disk-gb-per-s.
_NOT_IN_EVENTS = {'network_bytes_per_s': 1e9, 'disk_bytes_per_s': 1e9}


def predicted(
    row: Row, lived: Lived, iteration_s: float, period: int, waited_ms: float, mtbf_s: float
) -> float | None:
    """ETTR that the simulator predicts for the row under the same faults, over the same time.

    Args:
        row: the row.
        lived: its job.
        iteration_s: seconds of an iteration of plain Megatron.
        period: iterations between checkpoints, or of a window.
        waited_ms: milliseconds in an iteration for which training waits for checkpoints.
        mtbf_s: mean seconds between failures, as in the row's flags.
    """
    log = lived.trained.log
    origin, wall_s = log.iterations[0].time, measuring.span_s(log)
    faults = lived.injected
    process = Trace(
        np.array([fault.at - origin for fault in faults]),
        np.array([fault.rank for fault in faults], dtype=int),
        np.full(len(faults), math.inf),
        wall_s,
    )
    own_s = statistics.mean(measuring.undisturbed(log, lived.injected)) - waited_ms / 1000
    try:
        system = _system(row, lived, own_s, (period, waited_ms), mtbf_s)
        found = simulate(
            system.run or system.costs, process, nodes=RANKS, histories=_HISTORIES
        )  # fmt: skip
    except (DescriptionError, FieldError, InfeasiblePlan):
        return None
    # The simulator's useful seconds are those of this job, whose helpers share its cores.
    return found.ettr_of_first * iteration_s / own_s


def restart_s(back: list[Comeback]) -> float:
    """Seconds from a failure until state can be loaded: detection, new processes, new groups.

    Median over the recoveries, without the phases that the simulator computes itself.
    """
    before = PHASES[: PHASES.index('iterations again')]
    computed = profiles.COMPUTED_AGAIN
    return statistics.median(
        sum(one.phases[name] for name in before)
        - sum(one.engine.get(name, 0.0) for name in computed)
        for one in back
    )


def _system(
    row: Row, lived: Lived, own_s: float, checkpoints: tuple[int, float], mtbf_s: float
) -> System:
    """The row for the simulator. Raises DescriptionError, FieldError, InfeasiblePlan."""
    log = lived.trained.log
    period, waited_ms = checkpoints
    ready_s = restart_s(list(measuring.comebacks(lived)))
    job_s = log.iterations[-1].number * own_s
    if row.keeps is Keeps.NOTHING:
        # The job starts over, and is measured only from a later iteration on.
        again_s = log.iterations[0].number * own_s
        return build(row.system, Options(
            iteration_s=own_s, restart_s=ready_s + again_s, job_s=job_s
        ))  # fmt: skip
    if row.keeps is Keeps.DISK:
        return build(row.system, Options(
            iteration_s=own_s,
            interval=period,
            stall_s=waited_ms * period / 1000,
            restart_s=ready_s,
            job_s=job_s,
        ))  # fmt: skip
    given = _NOT_IN_EVENTS if row.system == 'checkfreq' else {}
    profile = profiles.derive(lived.folder / 'events', given)
    profile = replace(profile, iteration_s=own_s, restart_s=max(ready_s, 0.0))
    windows = row.system in ('ours', 'copy')
    options = Options(
        window=period if windows else None,
        interval=None if windows else period,
        mtbf_s=mtbf_s,
        job_s=job_s,
        pipeline=replace(profile.pipeline, micro_batches=MICRO_BATCHES),
        localized=row.localized,
        experts=four_ranks.MODEL.experts,
        saved=row.saved,
        lost_budget=row.lost_budget,
    )
    return build(row.system, options, profile)
