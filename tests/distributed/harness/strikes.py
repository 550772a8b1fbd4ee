# SPDX-License-Identifier: Apache-2.0
"""A long job that is struck many times, one failure after the other, in place of a job for each.

What a strike spoils is seen where it was made: each recovery compares what it replayed with what
had been captured (`Recovered.verified`, `differing`), and the final states of all ranks are
compared with those of a run that nothing happened to. When something is wrong, each strike is made
again in a job of its own, and the report says which are wrong alone.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec import UNSET

from moevement_ext.events import NextTier, Recovered, WorkerStarted
from tests.distributed.conftest import differences, read_digest
from tests.distributed.harness.cluster import Cluster

SETTLED = ['--sparse-ckpt-reorder-change', '1000']
"""No plan is replaced, which would move the beginnings of windows: what is verified is known."""
SEALED = 'probes.sealing:seal_before_death'
NOTHING = 'nothing is verified'
_SHOWN = 10
"""Of the names of what differs."""


@dataclass(frozen=True)
class Strike:
    """One failure: the death of a worker, of several, or of more while that is recovered from.

    Attributes:
        name: what is special about it.
        deaths: `<rank>:<iteration>:<phase>`, separated by commas. Those of one rank are in the
            order in which it dies; which of its lives each ends is counted, over all strikes.
        verified: newer captures are left to compare the replay of a victim with. They are if two
            iterations were committed since the newest window.
        also: ranks that end by themselves then, and are replaced.
    """

    name: str
    deaths: str
    verified: bool = True
    also: tuple[int, ...] = ()


def fail_at(strikes: Iterable[Strike]) -> str:
    """`MOEVEMENT_FAIL_AT` for strikes in the order in which they are made."""
    lives: Counter[int] = Counter()
    numbered = []
    for strike in strikes:
        for death in strike.deaths.split(','):
            rank = _victim(death)
            numbered.append(f'{death}:{lives[rank]}')
            lives[rank] += 1
        lives.update(strike.also)
    return ','.join(numbered)


def deaths(strikes: Iterable[Strike]) -> Counter[int]:
    """How often each rank dies."""
    found: Counter[int] = Counter()
    for strike in strikes:
        found.update(map(_victim, strike.deaths.split(',')))
        found.update(strike.also)
    return found


def strike_all(
    make: Callable[[], Cluster],
    strikes: Sequence[Strike],
    expected: dict,
    meanwhile: Callable[[Cluster], 'InTurn'] | None = None,
    lost_at: str = '',
    **survive: Any,
) -> Cluster:
    """A job that has survived all strikes, with the bits of `expected` and nothing wrong at any.

    Args:
        make: makes the job, and one for each strike if something is wrong.
        strikes: in the order in which they are made.
        expected: digest of a run that nothing happened to.
        meanwhile: makes what else a test does to the long job.
        lost_at: the whole job is lost there first, and started again.
        survive: for `Cluster.survive`.
    """
    job = make()
    in_turn = meanwhile(job) if meanwhile else None
    found = struck(job, strikes, expected, lost_at, strike=in_turn, **survive)
    assert found or in_turn is None or in_turn.done
    if found:
        lines = ['of all strikes in one job:', *found]
        for strike in strikes:
            alone = struck(make(), [strike], expected, lost_at, **survive)
            lines += [f'alone, {strike.name}: {"; ".join(alone) or "nothing is wrong"}']
        pytest.fail('\n'.join(lines), pytrace=False)
    return job


def struck(
    job: Cluster, strikes: Sequence[Strike], expected: dict, lost_at: str = '', **survive: Any
) -> list[str]:
    """Everything that is wrong with a job after it was struck; it has ended."""
    if lost_at:
        assert -9 in job.run(fail_at=lost_at, mutation=survive.get('mutation'))
    before = job.lives
    try:
        mutation = ','.join(filter(None, [survive.pop('mutation', None), SEALED]))
        restarts = job.survive(fail_at=fail_at(strikes), mutation=mutation, **survive)
    except (RuntimeError, TimeoutError) as error:
        return [f'{error}', *wrong_recoveries(job, strikes, before)]
    found = list(wrong_recoveries(job, strikes, before))
    if restarts != deaths(strikes):
        found.append(f'restarts: {restarts}, not {dict(deaths(strikes))}')
    differing = differences(expected, read_digest(job))
    if differing:
        found.append(f'{len(differing)} differ: {differing[:_SHOWN]}')
    if job.memory.exists():
        found.append('host memory is not given back')
    return found


def wrong_recoveries(job: Cluster, strikes: Sequence[Strike], before: int) -> Iterator[str]:
    """What the events of a job say of its recoveries that they should not, by strike."""
    ranks = range(job.ranks)
    lives = Counter(dict.fromkeys(ranks, before))  # of earlier launches
    started = [job.events_of(WorkerStarted, rank) for rank in ranks]
    together = {event.pid for events in started for event in events[before : before + 1]}
    for strike in strikes:
        lives += deaths([strike])
        yield from (f'{strike.name}: {text}' for text in _wrong(job, strike, lives))
    verified = 0
    for rank in ranks:
        for event in job.events_of(Recovered, rank):
            if event.differing:
                yield f'rank {rank} at {event.iteration}: {event.differing[:_SHOWN]} differ'
            if event.scope is UNSET:
                verified += event.verified
                if not before or event.pid not in together:
                    yield f'rank {rank} at {event.iteration}: recovered with the whole job'
        for fallback in job.events_of(NextTier, rank):
            yield f'rank {rank}: {fallback.tier}: {fallback.reason}'
    if before and not verified:
        yield f'the whole job: {NOTHING}'


def _successors(job: Cluster, strike: Strike, lives: Mapping[int, int]) -> dict[int, int]:
    """Process that has taken the place of each victim of a strike for good, if there is one."""
    started = {rank: job.events_of(WorkerStarted, rank) for rank in deaths([strike])}
    return {
        rank: events[lives[rank]].pid
        for rank, events in started.items()
        if len(events) > lives[rank]
    }


def _wrong(job: Cluster, strike: Strike, lives: Mapping[int, int]) -> Iterator[str]:
    successors, verified = _successors(job, strike, lives), 0
    for rank in deaths([strike]):
        recovered = [e for e in job.events_of(Recovered, rank) if e.pid == successors.get(rank)]
        if recovered:
            verified += recovered[0].verified
        else:
            yield f'rank {rank} has not come back in its life {lives[rank]}'
    if strike.verified and not verified:
        yield NOTHING


def _victim(death: str) -> int:
    return int(death.partition(':')[0])


class InTurn:
    """For `Cluster.survive(strike=...)`: what a test does to a job, one thing after the other.

    Args:
        steps: called with the workers and what starts one; yields conditions, and goes on when the
            last one is fulfilled.
    """

    def __init__(self, steps: Callable[[list, Callable], Iterator[Callable[[], bool]]]) -> None:
        self._steps = steps
        self._running: Iterator[Callable[[], bool]] | None = None
        self._condition: Callable[[], bool] | None = None
        self.done = False

    def __call__(self, workers: list, start: Callable) -> None:
        if self._running is None:
            self._running = self._steps(workers, start)
            self._condition = next(self._running)
        while not self.done and self._condition is not None and self._condition():
            self._condition = next(self._running, None)
            self.done = self._condition is None
