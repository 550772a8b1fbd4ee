# SPDX-License-Identifier: Apache-2.0
"""One long job with many successive failures, instead of one job per failure.

What a fault spoils is seen where it was made: each recovery compares what it replayed with what
had been captured (`Recovered.verified`, `differing`), and the final states of all ranks are
compared with those of a run that nothing happened to. When something is wrong, each fault is made
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

SETTLED = ['--sparse-ckpt-reorder-change', '1000', '--sparse-ckpt-max-wait', '60']
"""What is verified is known: no plan is replaced, which would move the beginnings of windows, and
none is skipped where a busy machine is late in replicating the one before."""
SEALED = 'probes.sealing:seal_before_death'
NOTHING = 'nothing is verified'
_SHOWN = 10
"""Of the names of what differs."""


@dataclass(frozen=True)
class Fault:
    """One failure: the death of a worker, of several, or of more while that is recovered from.

    Attributes:
        name: what is special about it.
        deaths: `<rank>:<iteration>:<phase>`, separated by commas. Those of one rank are in the
            order in which it dies; which of its attempts each ends is counted, over all faults.
        verified: newer captures are left to compare the replay of a victim with. They are if two
            iterations were committed since the newest window.
        also: ranks that end by themselves then, and are replaced.
    """

    name: str
    deaths: str
    verified: bool = True
    also: tuple[int, ...] = ()


def fail_at(faults: Iterable[Fault]) -> str:
    """`MOEVEMENT_FAIL_AT` for faults in the order in which they are made."""
    attempts: Counter[int] = Counter()
    numbered = []
    for fault in faults:
        for death in fault.deaths.split(','):
            rank = _victim(death)
            numbered.append(f'{death}:{attempts[rank]}')
            attempts[rank] += 1
        attempts.update(fault.also)
    return ','.join(numbered)


def deaths(faults: Iterable[Fault]) -> Counter[int]:
    """How often each rank dies."""
    found: Counter[int] = Counter()
    for fault in faults:
        found.update(map(_victim, fault.deaths.split(',')))
        found.update(fault.also)
    return found


def fault_all(
    make: Callable[[], Cluster],
    faults: Sequence[Fault],
    expected: dict,
    meanwhile: Callable[[Cluster], 'InTurn'] | None = None,
    lost_at: str = '',
    **survive: Any,
) -> Cluster:
    """A job that has survived all faults, with the bits of `expected` and nothing wrong at any.

    Args:
        make: makes the job, and one for each fault if something is wrong.
        faults: in the order in which they are made.
        expected: digest of a run that nothing happened to.
        meanwhile: makes what else a test does to the long job.
        lost_at: the whole job is lost there first, and started again.
        survive: for `Cluster.survive`.
    """
    job = make()
    in_turn = meanwhile(job) if meanwhile else None
    found = struck(job, faults, expected, lost_at, fault=in_turn, **survive)
    assert found or in_turn is None or in_turn.done
    if found:
        lines = ['of all faults in one job:', *found]
        for fault in faults:
            alone = struck(make(), [fault], expected, lost_at, **survive)
            lines += [f'alone, {fault.name}: {"; ".join(alone) or "nothing is wrong"}']
        pytest.fail('\n'.join(lines), pytrace=False)
    return job


def struck(
    job: Cluster, faults: Sequence[Fault], expected: dict, lost_at: str = '', **survive: Any
) -> list[str]:
    """Everything that is wrong with a job after it was struck; it has ended."""
    if lost_at:
        assert -9 in job.run(fail_at=lost_at, mutation=survive.get('mutation'))
    before = job.attempts
    try:
        mutation = ','.join(filter(None, [survive.pop('mutation', None), SEALED]))
        restarts = job.survive(fail_at=fail_at(faults), mutation=mutation, **survive)
    except (RuntimeError, TimeoutError) as error:
        return [f'{error}', *wrong_recoveries(job, faults, before)]
    found = list(wrong_recoveries(job, faults, before))
    if restarts != deaths(faults):
        found.append(f'restarts: {restarts}, not {dict(deaths(faults))}')
    differing = differences(expected, read_digest(job))
    if differing:
        found.append(f'{len(differing)} differ: {differing[:_SHOWN]}')
    if job.memory.exists():
        found.append('host memory is not given back')
    return found


def wrong_recoveries(job: Cluster, faults: Sequence[Fault], before: int) -> Iterator[str]:
    """What the events of a job say of its recoveries that they should not, by fault."""
    ranks = range(job.ranks)
    attempts = Counter(dict.fromkeys(ranks, before))  # of earlier launches
    started = [job.events_of(WorkerStarted, rank) for rank in ranks]
    together = {event.pid for events in started for event in events[before : before + 1]}
    for fault in faults:
        attempts += deaths([fault])
        yield from (f'{fault.name}: {text}' for text in _wrong(job, fault, attempts))
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


def _successors(job: Cluster, fault: Fault, attempts: Mapping[int, int]) -> dict[int, int]:
    """Process that has taken the place of each victim of a fault for good, if there is one."""
    started = {rank: job.events_of(WorkerStarted, rank) for rank in deaths([fault])}
    return {
        rank: events[attempts[rank]].pid
        for rank, events in started.items()
        if len(events) > attempts[rank]
    }


def _wrong(job: Cluster, fault: Fault, attempts: Mapping[int, int]) -> Iterator[str]:
    successors, verified = _successors(job, fault, attempts), 0
    for rank in deaths([fault]):
        recovered = [e for e in job.events_of(Recovered, rank) if e.pid == successors.get(rank)]
        if recovered:
            verified += recovered[0].verified
        else:
            yield f'rank {rank} has not come back in its attempt {attempts[rank]}'
    if fault.verified and not verified:
        yield NOTHING


def _victim(death: str) -> int:
    return int(death.partition(':')[0])


class InTurn:
    """For `Cluster.survive(fault=...)`: what a test does to a job, one thing after the other.

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
