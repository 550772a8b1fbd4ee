# SPDX-License-Identifier: Apache-2.0
"""Verdict on a drill or the demo: whether and how the job recovered from every failure."""

from collections.abc import Sequence

from rich.table import Table

from moevement_ext.events import DeviceProblem, Event, NextTier, Recovered

from ..lab import tables
from ..lab.evidence import kind_of
from ..lab.history import Episode


def recoveries(events: Sequence[Event], ranks: int) -> list[Episode]:
    """Recoveries in the order of time; of those that a rank did not complete, a part is known."""
    by_rank = [[e for e in kind_of(events, Recovered) if e.rank == rank] for rank in range(ranks)]
    most = max(map(len, by_rank), default=0)
    rounds = [[own[k] for own in by_rank if k < len(own)] for k in range(most)]
    return [Episode(one[0].time, one[-1].time, one) for one in rounds]


def replaced(recovery: Episode) -> list[int]:
    return sorted({rank for one in recovery.recovered for rank in one.replacements})


def problems(events: Sequence[Event], ranks: int, failures: int, kinds: Sequence[str]) -> list[str]:
    """Reasons to fail the drill; empty if it passed."""
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
            rank, name = recovery.differing[0]
            count = len(recovery.differing)
            found.append(
                f'recovery {number}: {count} operators differ, such as rank {rank}: {name}'
            )
    tiers = sorted({f'{event.tier}: {event.reason}' for event in kind_of(events, NextTier)})
    return found + [f'it went on from {tier}' for tier in tiers]


def devices(events: Sequence[Event]) -> list[str]:
    """GPU problems, each once; they do not fail the drill."""
    found = (
        f'rank {event.rank}: GPU {event.device}: {event.what}'
        for event in kind_of(events, DeviceProblem)
    )
    return list(dict.fromkeys(found))


def table(found: Sequence[Episode]) -> Table:
    columns = ('>', 'scope', '>stages', '>replaced ranks', '>replayed', '>seconds', '>verified',
               '>differing')  # fmt: skip
    rows = (
        (str(number), one.scope, _listed(one.stages), _listed(replaced(one)), str(one.replayed),
         f'{max(sum(event.seconds.values()) for event in one.recovered):.1f}', str(one.verified),
         str(len(one.differing)))
        for number, one in enumerate(found, 1)
    )  # fmt: skip
    return tables.table(columns, rows, title='Recoveries', title_justify='left')


def _listed(numbers: Sequence[int]) -> str:
    return ' '.join(map(str, numbers)) or '-'
