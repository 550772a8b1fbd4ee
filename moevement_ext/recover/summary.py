# SPDX-License-Identifier: Apache-2.0
"""The line about the outcome of a recovery: the last message of a recovery, from one rank.

sparse ckpt | 2026-01-31 04:32:52 | RECOVERED at iteration 37 | rank 1 on node0 was killed by
SIGKILL at 04:32:41 | lost iterations: 0 | computed again: 6 | away: 11.2 s (starting processes
7.9, replaying 2.8, connecting 0.3, the rest 0.2) | goes on from: window 31, checksums right |
verified: ... | spares left: 0 |
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moevement_ext.recover.verification import Verified

_MOST_DEATHS = 4


class Gone(NamedTuple):
    """A process that died."""

    rank: int
    node: str
    """Empty if unknown."""
    how: str
    """For example `was killed by SIGKILL`; empty if unknown."""
    at: float | None = None


@dataclass(frozen=True)
class Summary:
    """The outcome of a recovery."""

    iteration: int
    """Iteration from which all ranks continue."""
    cause: str
    """Dead processes with time and cause of death, or another cause."""
    lost: int | None
    """Committed iterations that are lost; None: unknown, as all records are lost."""
    replayed: int
    away_s: float | None
    """Seconds since the failure; None if its time is unknown."""
    seconds: Mapping[str, float]
    """Parts of that time, by their words in the line."""
    source: str
    """State that the job continues from."""
    verified: Verified | None
    """None if nothing was computed again."""
    spares: str = ''
    """Remaining spares, in words; empty if the launcher has not reported them."""

    @property
    def is_exact(self) -> bool:
        """True if no iteration is lost, and no difference was found."""
        verified = self.verified
        return self.lost == 0 and not (verified and (verified.differing or verified.tokens_lost))

    def line(self, now: float) -> str:
        """The line for the log, in Megatron's format; `now` is seconds since the epoch."""
        lost = (
            'unknown, as the memory that counted them is lost' if self.lost is None else self.lost
        )
        fields = [
            time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now)),
            f'RECOVERED at iteration {self.iteration}',
            self.cause,
            f'lost iterations: {lost}',
            f'computed again: {self.replayed}',
            f'away: {_away(self.away_s, self.seconds)}',
            f'goes on from: {self.source}',
        ]
        if self.verified is not None:
            fields.append(str(self.verified))
            if self.verified.tokens_lost is not None:
                fields.append(f'tokens lost: {self.verified.tokens_lost:.0f}')
        if self.spares:
            fields.append(f'spares left: {self.spares}')
        return ' sparse ckpt | ' + ' | '.join(fields) + ' |'


def deaths(gone: Iterable[Gone]) -> str:
    """Format deaths, with the ranks of a node together at the time of the first."""
    alike: dict[tuple[str, str], list[Gone]] = {}
    for one in sorted(gone):
        alike.setdefault((one.node, one.how), []).append(one)
    words = [_died(node, how, together) for (node, how), together in alike.items()]
    more = f' and {len(words) - _MOST_DEATHS} more' if len(words) > _MOST_DEATHS else ''
    return ', '.join(words[:_MOST_DEATHS]) + more


def together(verified: Sequence[Verified]) -> Verified:
    lost = [one.tokens_lost for one in verified if one.tokens_lost is not None]
    return Verified(
        sum(one.verified for one in verified),
        max((one.verified_at for one in verified), default=-1),
        tuple(sorted({name for one in verified for name in one.differing})),
        max((one.iterations for one in verified), default=0),
        sum(lost) if lost else None,
    )


def _died(node: str, how: str, gone: Sequence[Gone]) -> str:
    where = f' on {node}' if node else ''
    first = min((one.at for one in gone if one.at is not None), default=None)
    when = '' if first is None else time.strftime(' at %H:%M:%S', time.localtime(first))
    plural = len(gone) > 1
    how = how or 'died'
    if plural:
        how = how.replace('was ', 'were ', 1) if how.startswith('was ') else how
    return f'rank{"s" if plural else ""} {_ranges([one.rank for one in gone])}{where} {how}{when}'


def _ranges(ranks: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] + 1 == rank:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ', '.join(str(run[0]) if len(run) == 1 else f'{run[0]}-{run[-1]}' for run in runs)


def _away(away_s: float | None, seconds: Mapping[str, float]) -> str:
    known = {name: value for name, value in seconds.items() if value >= 0.05}
    parts = [f'{name} {value:.1f}' for name, value in known.items()]
    if away_s is None:
        return f'since a time that nothing here has seen ({", ".join(parts)} s)'
    rest = away_s - sum(known.values())
    if rest >= 0.05:
        parts.append(f'the rest {rest:.1f}')
    return f'{away_s:.1f} s' + (f' ({", ".join(parts)})' if parts else '')


def conversion_line(start: int, dense_at: int, source: str) -> str:
    """Format the end of all stages' conversion, with the source of this rank's window."""
    return (
        f' sparse ckpt | converted window: {start} | from: {source} | dense at iteration: '
        f'{dense_at} | replayed iterations: {dense_at - start} |'
    )


def recovered_line(iteration: int, replayed: int, verified: Verified) -> str:
    """Format the end of a rank's replay: the iteration reached, and whether it is exact."""
    return (
        f' sparse ckpt | recovered at iteration: {iteration} | replayed iterations: {replayed} | '
        f'{verified} |'
    )
