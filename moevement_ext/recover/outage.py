# SPDX-License-Identifier: Apache-2.0
"""Follows outages on this rank and reports the outcome in one line. Training thread only.

One rank reports for all. After a localized recovery this is the first survivor, since it has the
earlier state; it reports once the next iteration is committed, after all other messages. After a
recovery of the whole job the last rank reports, as upstream does. The line, in one:

sparse ckpt | 2026-01-31 04:32:52 | RECOVERED at iteration 37 | rank 1 on node0 was killed by
SIGKILL at 04:32:41 | lost iterations: 0 | computed again: 6 | away: 11.2 s (starting processes
7.9, replaying 2.8, connecting 0.3, the rest 0.2) | goes on from: window 31, checksums right |
verified: ... |
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import msgspec
from torch.distributed import Store

from moevement_ext.errors import some
from moevement_ext.logger import highlighted, logger_of
from moevement_ext.membership import mailbox
from moevement_ext.membership.mailbox import End, of_launch, own_launch
from moevement_ext.membership.rendezvous import launcher_store
from moevement_ext.membership.report import Report
from moevement_ext.memory.node_store import Death
from moevement_ext.recover.verdict import Localized
from moevement_ext.recover.verification import Verified

logger = logger_of(__name__)

_TO_CONNECT = timedelta(seconds=20)
# Largest usual difference between the clocks of synchronized nodes.
_CLOCKS_DIFFER_S = 1.0
_MOST_DEATHS = 4


_VERIFIED = msgspec.msgpack.Decoder(Verified)


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
        return ' sparse ckpt | ' + ' | '.join(fields) + ' |'


def deaths(gone: Iterable[End]) -> str:
    """Format deaths, with the ranks of a node together at the time of the first."""
    alike: dict[tuple[str, str], list[End]] = {}
    for one in sorted(gone):
        alike.setdefault((one.node, one.how), []).append(one)
    words = [_died(node, how, together) for (node, how), together in alike.items()]
    return some(words, _MOST_DEATHS)


def together(verified: Sequence[Verified]) -> Verified:
    lost = [one.tokens_lost for one in verified if one.tokens_lost is not None]
    return Verified(
        sum(one.verified for one in verified),
        max((one.verified_at for one in verified), default=-1),
        tuple(sorted({name for one in verified for name in one.differing})),
        max((one.iterations for one in verified), default=0),
        sum(lost) if lost else None,
    )


def _died(node: str, how: str, gone: Sequence[End]) -> str:
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


@dataclass
class Phases:
    """Seconds of each phase of a localized recovery on this rank."""

    detect: float = 0.0
    unblock: float = 0.0
    respawn: float = 0.0
    regroup: float = 0.0
    fetch: float = 0.0
    convert: float = 0.0
    catch_up: float = 0.0

    def in_words(self) -> dict[str, float]:
        """Return the phases that every rank passes through, by their names in the log line."""
        return {
            'noticing it': self.detect + self.unblock,
            'starting processes': self.respawn,
            'connecting': self.regroup,
        }


class Outage:
    """Outages of localized recoveries; a failure during an outage belongs to the same outage."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._since: float | None = None
        self._reason = ''
        self._before: Sequence[Report] = []
        # Node and number of the dead processes, by rank.
        self._gone: dict[int, tuple[str, int]] = {}
        self._replay_s = 0.0
        self._unsaid: Summary | None = None

    def begins(self, reason: str, detect_s: float, reports: Sequence[Report]) -> None:
        """Record that this rank has left a round, `detect_s` seconds after the announcement.

        `reports` are those of the processes before the failure, by rank.
        """
        self._before = list(reports)
        if self._since is None:
            self._since, self._reason, self._gone = time.time() - detect_s, reason, {}

    def met(self, reports: Sequence[Report]) -> None:
        """Record a rendezvous of all ranks; ranks without state are new processes."""
        for rank, (before, now) in enumerate(zip(self._before, reports, strict=False)):
            if not now.survivor and before.process != now.process:
                self._gone.setdefault(rank, (before.node, before.process))

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Measure the time in which some ranks replay, and the other ranks wait."""
        began = time.perf_counter()
        yield
        self._replay_s = time.perf_counter() - began

    def publish_verified(self, store: Store, verified: Verified) -> None:
        """Publish this rank's verification after its replay, before the other ranks continue."""
        store.set(_verified(self._rank), msgspec.msgpack.encode(verified))  # type: ignore[arg-type]

    def is_over(
        self,
        store: Store,
        verdict: Localized,
        reports: Sequence[Report],
        seconds: Mapping[str, float],
    ) -> None:
        """Record that all ranks are connected again, at `verdict.target`.

        `seconds` are this rank's, by phase, with the names of the log line.
        """
        since, self._since = self._since, None
        speaker = next((rank for rank, report in enumerate(reports) if report.survivor), None)
        if speaker != self._rank or since is None:
            return
        away_s = max(time.time() - since, 0.0)  # the clock may have been set back
        if verdict.window is not None:
            seconds = {**seconds, 'replaying': self._replay_s}
        self._unsaid = _never_fails(lambda: self._summary(store, verdict, away_s, seconds))

    def say(self) -> None:
        """Log the outcome, once an iteration is committed or training has ended."""
        summary, self._unsaid = self._unsaid, None
        if summary is not None:
            _log(summary)

    def _summary(
        self, store: Store, verdict: Localized, away_s: float, seconds: Mapping[str, float]
    ) -> Summary:
        launcher = _launcher()
        cause = f'no process died: {self._reason}'
        if self._gone:
            gone = [_gone(launcher, rank, *was) for rank, was in sorted(self._gone.items())]
            cause = deaths(gone)
        verified = None
        replayed = 0
        if verdict.window is not None:
            found = store.multi_get([_verified(rank) for rank in sorted(verdict.ranks)])
            verified = together([_VERIFIED.decode(one) for one in found])
            replayed = verdict.target - verdict.window.start
        return Summary(
            iteration=verdict.target,
            cause=cause,
            lost=0,  # the newest iteration that any survivor had committed is the target
            replayed=replayed,
            away_s=away_s,
            seconds=seconds,
            source=_source(verdict),
            verified=verified,
        )


def of_the_whole_job(
    first_death: Death | None, summary: Callable[[str, float | None], Summary]
) -> None:
    """Report the outcome of a recovery of the whole job, on one rank.

    `first_death` is the first that the previous attempt's watchdogs recorded. `summary` makes
    the summary from cause and time of the failure.
    """

    def make() -> Summary:
        launcher = _launcher()
        restarts = int(os.environ.get('TORCHELASTIC_RESTART_COUNT', '0'))
        cause = None if launcher is None else mailbox.read_cause(launcher, restarts)
        if cause is None and first_death is not None:
            how = f'(pid {first_death.pid}) was the first to end,'
            cause = End(first_death.rank, how, first_death.time)
        if cause is None:
            return summary('the job was launched again', None)
        return summary(deaths([cause]), _if_past(cause.at))

    found = _never_fails(make)
    if found is not None:
        _log(found)


def _launcher() -> Store | None:
    store = launcher_store(_TO_CONNECT)
    return None if store is None else of_launch(store, own_launch())


def _log(summary: Summary) -> None:
    """Print the summary, and send it to the launcher."""
    line = summary.line(time.time())
    print(highlighted(line, sys.stdout, summary.is_exact), flush=True)

    def publish() -> None:
        launcher = _launcher()
        if launcher is not None:
            mailbox.write_recovery(launcher, line)

    _never_fails(publish)


def _never_fails[T](make: Callable[[], T]) -> T | None:
    """Run a report without failing training (invariant I6)."""
    try:
        return make()
    except Exception:
        logger.warning('a recovery has no summary', exc_info=True)
        return None


def _if_past(at: float | None) -> float | None:
    """Return None for a future time: the clock of another node is ahead, or this one was set back.

    A difference that is usual between clocks counts as none.
    """
    now = time.time()
    return min(at, now) if at is not None and at <= now + _CLOCKS_DIFFER_S else None


def _gone(launcher: Store | None, rank: int, node: str, process: int) -> End:
    death = None if launcher is None else mailbox.read_death(launcher, process)
    return (death or End(rank))._replace(node=node)


def _source(verdict: Localized) -> str:
    if verdict.window is not None and verdict.together:
        return f'window {verdict.window.start} on all stages'
    if verdict.window is not None:
        stages = ', '.join(map(str, sorted(verdict.stages)))
        plural = 's' if len(verdict.stages) > 1 else ''
        return (
            f'window {verdict.window.start} and the logs on stage{plural} {stages}, '
            'their own state on the others'
        )
    if verdict.copies:
        copied = ', '.join(map(str, sorted(verdict.copies)))
        return f'the state of data-parallel replicas on ranks {copied}, their own on the others'
    return 'the state that every rank still has'


def _verified(rank: int) -> str:
    return f'verified/{rank}'
