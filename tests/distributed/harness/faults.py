# SPDX-License-Identifier: Apache-2.0
"""One long job with many successive failures, instead of one job per failure.

Damage is detected where it happens: each recovery compares the replayed state with the captured
state (`Recovered.verified`, `differing`), and the final states of all ranks are compared with those
of a fault-free run. If something is wrong, each fault is repeated in a job of its own, and the
report lists the faults that also fail alone.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from moevement_ext.events import NextTier, Recovered, WorkerStarted
from tests.distributed.conftest import differences, read_digest
from tests.distributed.harness.cluster import Cluster

SETTLED = ['reorder_change=1000', 'max_wait=60']
"""Settings that make the verified slots predictable: no plan is replaced, which would move the
starts of windows, and no window is skipped because a busy machine replicates the previous one
late."""
SEALED = 'probes.sealing:seal_before_death'
PERSISTED = 'probes.sealing:persist_before_death'
STEPPED = 'probes.sealing:all_step_before_death'
NOTHING = 'nothing is verified'
_TIMEOUT_S = 850.0  # of minutes on a slow machine
_SHOWN = 10
"""Maximum number of differing names in a message."""


@dataclass(frozen=True)
class Fault:
    """One failure: death of one or several workers, maybe of more during the recovery.

    Attributes:
        name: what is special about it.
        deaths: `<rank>:<iteration>:<phase>`, separated by commas. Deaths of one rank are in the
            order in which they happen; the attempt that each one ends is counted over all faults.
        verified: newer captures exist to compare the replay of a victim with. They exist if two
            iterations were committed since the newest window.
        also: ranks that then exit by themselves and are replaced.
    """

    name: str
    deaths: str
    verified: bool = True
    also: tuple[int, ...] = ()


def fail_at(faults: Iterable[Fault]) -> str:
    """`MOEVEMENT_FAIL_AT` for faults in the order in which they happen."""
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
    """Run a job that must survive all faults and end with the bits of `expected`.

    Args:
        make: creates the job, and one job for each fault if something is wrong.
        faults: in the order in which they happen.
        expected: digest of a fault-free run.
        meanwhile: creates the further steps of a test on the long job.
        lost_at: the whole job first dies there, and is started again.
        survive: arguments of `Cluster.survive`.
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
    """Run a job with faults to its end; return everything that is wrong with it."""
    mutation = ','.join(filter(None, [survive.pop('mutation', None), SEALED]))
    if lost_at:
        assert -9 in job.run(fail_at=lost_at, mutation=mutation)
    before = job.attempts
    try:
        restarts = job.survive(
            fail_at=fail_at(faults), mutation=mutation, timeout_s=_TIMEOUT_S, **survive
        )
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
    """Wrong or missing events of the recoveries of a job, by fault."""
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
            if event.scope == 'whole-job':
                verified += event.verified
                if not before or event.pid not in together:
                    yield f'rank {rank} at {event.iteration}: recovered with the whole job'
        for fallback in job.events_of(NextTier, rank):
            yield f'rank {rank}: {fallback.tier}: {fallback.reason}'
    if before and not verified:
        yield f'the whole job: {NOTHING}'


def _successors(job: Cluster, fault: Fault, attempts: Mapping[int, int]) -> dict[int, int]:
    """Final replacement process of each victim of a fault, if there is one."""
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
    """Steps of a test on a running job, for `Cluster.survive(fault=...)`.

    Args:
        steps: called with the workers and a function that starts a worker; yields conditions, and
            is resumed when the last one holds.
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
