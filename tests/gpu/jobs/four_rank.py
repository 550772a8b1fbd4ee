# SPDX-License-Identifier: Apache-2.0
"""Check: two pipeline stages of two expert-parallel ranks; a lost stage must recover alone."""

from collections.abc import Iterator

from moevement_ext.events import Recovered
from tests.gpu.jobs.findings import Findings, Settings
from tests.gpu.jobs.training import Kill, Trials, compare, costs, reduced
from tools.lab import models
from tools.lab.evidence import Tier, kind_of
from tools.lab.job import Trained
from tools.lab.launch import Launcher
from tools.lab.presets import STAGE_RANKS, WORLD_SIZE, training_flags

WINDOW = 3
ITERATIONS = 16
KILL = Kill(rank=2, after=9)
_LOST_STAGE = 1


def run(settings: Settings) -> Iterator[Findings]:
    """Train the demo's model without windows, with them, and under torchrun with a killed rank."""
    folder = settings.folder('four-rank')
    data = models.prepare_text(settings.output / 'data', megabytes=1)
    flags = training_flags(data, ITERATIONS)
    trials = Trials(settings, folder, flags, nodes=WORLD_SIZE, window=WINDOW)
    plain, windows = trials.plain('plain'), trials.protected('windows')
    same = not compare(plain, windows, 'with windows')
    yield Findings(costs(plain, windows) | {'as_plain': same}, reduced(windows))
    # Its agents set variables that change how torch handles a lost rank.
    killed = trials._replace(launcher=Launcher.TORCHRUN).protected('killed', KILL)
    found = killed.recovery
    figures = {
        'came_back': str(found.tier) if found else 'no',
        'replayed': found.replayed if found else 0,
        'phases_s': _slowest(killed),
    }
    problems = compare(windows, killed, 'killed')
    yield Findings(figures, problems + not_localized(killed))


def not_localized(killed: Trained) -> list[str]:
    """Stages that rolled back, other than the stage that lost a rank."""
    found = killed.recovery
    if found is None or found.tier is not Tier.LOCALIZED:
        return [f'killed: it came back from {found.tier if found else "nothing"}, not localized']
    problems = []
    for event in kind_of(killed.events, Recovered):
        lost = event.rank in STAGE_RANKS[_LOST_STAGE]
        if event.stages != [_LOST_STAGE] or bool(event.replayed) != lost:
            problems.append(
                f'killed: rank {event.rank} replayed {event.replayed} iterations, and says that '
                f'stages {event.stages} rolled back'
            )
    return problems


def _slowest(killed: Trained) -> dict[str, float]:
    """Seconds of each phase of the recovery, on the slowest rank."""
    slowest: dict[str, float] = {}
    for event in kind_of(killed.events, Recovered):
        for phase, seconds in event.seconds.items():
            slowest[phase] = max(seconds, slowest.get(phase, 0.0))
    return slowest
