# SPDX-License-Identifier: Apache-2.0
"""MoC-System trains; a worker is SIGKILLed between two checkpoints.

What it loses in other cases: `tests/unit/recover/test_lossy_strategies.py`.
"""

import json
from collections.abc import Callable

import pytest

from moevement_ext.events import NextTier, Protected, Recovered, RecoveryStarted, TokensLost
from tests.distributed.conftest import differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.test_localized_recovery import BASE, flags_of

INTERVAL = 3
START, TARGET = 6, 8
MOC = f'--sparse-ckpt-strategy moc --sparse-ckpt-interval {INTERVAL} --sparse-ckpt-experts'.split()
Make = Callable[..., Cluster]

pytestmark = pytest.mark.thorough


def survived(job: Cluster, mutation: str | None = None) -> dict[int, TokensLost]:
    """All went back to one checkpoint, in processes that live; what was lost, by rank."""
    assert job.survive(fail_at=f'1:{TARGET + 1}:forward', mutation=mutation) == {1: 1}
    for rank in range(job.ranks):
        assert [event.start for event in job.events_of(RecoveryStarted, rank)] == [START]
        (event,) = job.events_of(Recovered, rank)
        assert (event.scope, event.target, event.replayed) == ('global', TARGET, TARGET - START)
        assert job.events_of(NextTier, rank) == []
    lost = {rank: job.events_of(TokensLost, rank) for rank in range(job.ranks)}
    assert all(len(events) == 1 and events[0].start == START for events in lost.values())
    return {rank: event for rank, (event,) in lost.items()}


def experts_of(job: Cluster, rank: int) -> list[str]:
    return job.events_of(Protected, rank)[0].experts


def test_all_experts_are_exact(cluster: Make, reference: Callable[..., dict]) -> None:
    job = cluster(*flags_of(BASE), *MOC, '4')
    lost = survived(job)
    assert differences(reference(*flags_of(BASE)), read_digest(job)) == []
    assert {event.tokens for event in lost.values()} == {0}
    assert not any(event.differing for event in job.events_of(Recovered, 0))
    assert {event.replicas for event in job.events_of(Protected, 0)} == {1}


def check_versions(job: Cluster, lost: dict[int, TokensLost]) -> None:
    """What each rank has loaded of each operator it had once captured, in that iteration."""
    for rank, event in lost.items():
        lines = (job.directory / 'events' / f'rank{rank}.states').read_text().splitlines()
        notes = [json.loads(line) for line in lines]
        captured = {note['captures']: note['states'] for note in notes[::-1] if 'captures' in note}
        (loaded,) = (note['states'] for note in notes if note.get('loads') == START)
        assert set(experts_of(job, rank)) <= event.versions.keys()
        for name, state in loaded.items():
            assert state == captured[event.versions.get(name, START)][name], name


def test_experts_are_of_the_versions_that_are_named(
    cluster: Make, reference: Callable[..., dict]
) -> None:
    job = cluster(*flags_of(BASE), *MOC, '1')
    lost = survived(job, 'mutations.experts:states_are_noted')
    check_versions(job, lost)
    versions = {version for event in lost.values() for version in event.versions.values()}
    assert len(versions) > 1 and max(versions) == START
    assert min(event.tokens for event in lost.values()) > 0
    assert all(event.share > 0 for event in lost.values())
    assert differences(reference(*flags_of(BASE)), read_digest(job)) != []
    recovered = [event for rank in range(job.ranks) for event in job.events_of(Recovered, rank)]
    assert any('gradient norm' in name for event in recovered for name in event.differing)


def test_forgotten_step_counts_are_noticed(cluster: Make) -> None:
    job = cluster(*flags_of(BASE), *MOC, '1')
    lost = survived(job, 'mutations.experts:step_is_forgotten')
    with pytest.raises(AssertionError):
        check_versions(job, lost)
