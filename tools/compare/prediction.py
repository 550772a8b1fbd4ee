# SPDX-License-Identifier: Apache-2.0
"""Predicts the ETTR of a job by the simulator, from the profile of that job and its faults."""

from dataclasses import replace

from moevement_ext.plan.byte_planner import InfeasiblePlan
from tools.compare import measuring
from tools.compare.measuring import Comeback
from tools.compare.rows import Keeps, Row
from tools.compare.running import MICRO_BATCHES, RANKS, Lived
from tools.compare.trace import for_simulator
from tools.lab.figures import medians
from tools.simulate import run_profile
from tools.simulate.fields import FieldError
from tools.simulate.monte_carlo import simulate
from tools.simulate.profile import Profile, ProfileError
from tools.simulate.systems import Options, System, build

_HISTORIES = 2  # the first one has the faults of the job
# Without replicas nothing measures the network, which is then not used; the default of
# --sparse-ckpt-disk-gb-per-s.
_NOT_IN_EVENTS = {'network_bytes_per_s': 1e9, 'disk_bytes_per_s': 1e9}


def predicted(
    row: Row, lived: Lived, iteration_s: float, period: int, waited_ms: float
) -> float | None:
    """ETTR that the simulator gives the row under the same faults, over the same time.

    The profile is that of the job itself: pace, rates, bytes, seconds of restarts.

    Args:
        row: the row.
        lived: its job.
        iteration_s: seconds of an iteration of plain Megatron.
        period: iterations between checkpoints, or of a window.
        waited_ms: milliseconds in an iteration for which training waits for checkpoints.
    """
    log = lived.trained.log
    origin, wall_s = log.iterations[0].time, measuring.span_s(log)
    back = list(measuring.comebacks(lived))
    process = for_simulator(
        [strike.at - origin for strike in lived.strikes],
        [strike.rank for strike in lived.strikes],
        wall_s,
    )
    try:
        system = _system(row, lived, iteration_s, (period, waited_ms), back)
        found = simulate(
            system.run or system.costs, process, nodes=RANKS, histories=_HISTORIES
        )  # fmt: skip
    except (ProfileError, FieldError, InfeasiblePlan):
        return None
    line = found.timeline
    return float(line.useful_s[-1] / line.seconds[-1])


def _system(
    row: Row, lived: Lived, iteration_s: float, checkpoints: tuple[int, float], back: list[Comeback]
) -> System:
    """The row for the simulator. Raises ProfileError, FieldError, InfeasiblePlan."""
    log = lived.trained.log
    period, waited_ms = checkpoints
    again = {'iterations again', 'new iteration'}
    restart_s = medians([one.phases for one in back])
    ready_s = sum(value for name, value in restart_s.items() if name not in again)
    if row.keeps is not Keeps.MEMORY:
        return build(row.system, Options(
            iteration_s=iteration_s,
            interval=period if row.keeps is Keeps.DISK else None,
            stall_s=waited_ms * period / 1000,
            restart_s=ready_s,
            job_s=log.iterations[-1].number * iteration_s,
        ))  # fmt: skip
    given = _NOT_IN_EVENTS if row.system == 'checkfreq' else {}
    profile = _with_pace(run_profile.derive(lived.folder / 'events', given), iteration_s)
    windows = row.system in ('ours', 'copy')
    options = Options(
        window=period if windows else None,
        interval=None if windows else period,
        mtbf_s=measuring.span_s(log) / len(lived.strikes),
        job_s=log.iterations[-1].number * iteration_s,
        pipeline=replace(profile.pipeline, micro_batches=MICRO_BATCHES),
        localized=row.localized,
        saved=row.saved,
        lost_budget=row.lost_budget,
    )
    return build(row.system, options, profile)


def _with_pace(profile: Profile, iteration_s: float) -> Profile:
    """The profile with plain Megatron's pace: what protection costs is predicted, too."""
    return replace(profile, iteration_s=iteration_s)
