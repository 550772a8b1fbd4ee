# SPDX-License-Identifier: Apache-2.0
"""What a drill or the demo shows: did the job come back from every failure, and how?"""

from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table

from moevement_ext.events import DeviceProblem, Event, NextTier, Recovered
from tools.lab.evidence import kind_of


class Recovery(NamedTuple):
    """What all ranks say of one recovery."""

    scope: str
    """`localized`, or `whole job`."""
    stages: list[int]
    """That went back; empty: all."""
    replaced: list[int]
    """Ranks whose process was replaced."""
    replayed: int
    """Iterations computed again, on the rank that did most."""
    seconds: float
    """On the slowest rank."""
    verified: int
    """Operators compared with captures before the failure, on all ranks."""
    differing: list[str]
    """Those whose state was another, with the rank."""


def recoveries(events: Sequence[Event], ranks: int) -> list[Recovery]:
    """In the order of time; of those that not every rank has been through, what is known."""
    by_rank = [[e for e in kind_of(events, Recovered) if e.rank == rank] for rank in range(ranks)]
    most = max(map(len, by_rank), default=0)
    return [_of([own[k] for own in by_rank if k < len(own)]) for k in range(most)]


def problems(events: Sequence[Event], ranks: int, failures: int, kinds: Sequence[str]) -> list[str]:
    """Why it was not as it must be; nothing if it was.

    Args:
        events: of all ranks, in the order of time.
        ranks: of the job.
        failures: that were staged.
        kinds: of the final state that differ from those of the undisturbed job.
    """
    found = (
        [f'the final state differs from the undisturbed one: {" ".join(kinds)}'] if kinds else []
    )
    counts = [
        sum(event.rank == rank for event in kind_of(events, Recovered)) for rank in range(ranks)
    ]
    if min(counts, default=0) < failures or len(set(counts)) > 1:
        found.append(f'{failures} failures were staged; recoveries by rank: {counts}')
    for number, recovery in enumerate(recoveries(events, ranks), 1):
        if recovery.differing:
            found.append(f'recovery {number}: {len(recovery.differing)} operators differ, such as '
                         f'{recovery.differing[0]}')  # fmt: skip
    tiers = sorted({f'{event.tier}: {event.reason}' for event in kind_of(events, NextTier)})
    return found + [f'it went on from {tier}' for tier in tiers]


def devices(events: Sequence[Event]) -> list[str]:
    """What was found to be wrong with GPUs, each once; it is no reason not to pass."""
    found = (
        f'rank {event.rank}: GPU {event.device}: {event.what} ({event.harm})'
        for event in kind_of(events, DeviceProblem)
    )
    return list(dict.fromkeys(found))


def table(found: Sequence[Recovery]) -> Table:
    """For people."""
    shown = Table(title='Recoveries', title_justify='left')
    for column in ('', 'scope', 'stages', 'replaced ranks', 'replayed', 'seconds', 'verified',
                   'differing'):  # fmt: skip
        shown.add_column(column, justify='left' if column == 'scope' else 'right')
    for number, one in enumerate(found, 1):
        shown.add_row(
            str(number), one.scope, _listed(one.stages), _listed(one.replaced), str(one.replayed),
            f'{one.seconds:.1f}', str(one.verified), str(len(one.differing)),
        )  # fmt: skip
    return shown


def _of(events: Sequence[Recovered]) -> Recovery:
    stages = {stage for one in events if isinstance(one.stages, list) for stage in one.stages}
    new = {rank for one in events if isinstance(one.newcomers, list) for rank in one.newcomers}
    return Recovery(
        scope='localized' if all(event.localized for event in events) else 'whole job',
        stages=sorted(stages),
        replaced=sorted(new),
        replayed=max(event.replayed for event in events),
        seconds=max(sum(event.seconds.values()) for event in events),
        verified=sum(event.verified for event in events),
        differing=[f'rank {event.rank}: {name}' for event in events for name in event.differing],
    )


def _listed(numbers: Sequence[int]) -> str:
    return ' '.join(map(str, numbers)) or '-'
