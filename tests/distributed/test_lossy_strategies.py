# SPDX-License-Identifier: Apache-2.0
"""MoC-System and MoEtion train; a worker is SIGKILLed between two checkpoints.

What it loses in other cases: `tests/unit/recover/test_lossy_strategies.py`.
"""

import json

import pytest

from moevement_ext.events import NextTier, Protected, Recovered, RecoveryStarted, TokensLost
from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.test_localized_recovery import BASE, flags_of

INTERVAL = 3
START, TARGET = 6, 8
MOC = f'--sparse-ckpt-strategy moc --sparse-ckpt-interval {INTERVAL} --sparse-ckpt-experts'.split()

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


def test_all_experts_are_exact(cluster: Make, reference: Reference) -> None:
    job = cluster(*flags_of(BASE), *MOC, '4')
    lost = survived(job)
    assert differences(reference(*flags_of(BASE)), read_digest(job)) == []
    assert {event.tokens for event in lost.values()} == {0}
    assert not any(event.differing for event in job.events_of(Recovered, 0))
    assert {event.replicas for event in job.events_of(Protected, 0)} == {1}


def check_versions(job: Cluster, lost: dict[int, TokensLost]) -> set[int]:
    """What each rank has loaded of each operator it had once captured, in that iteration.

    Returns:
        The iterations.
    """
    for rank, event in lost.items():
        notes = notes_of(job, rank)
        captured = {note['captures']: note['states'] for note in notes[::-1] if 'captures' in note}
        (loaded,) = (note['states'] for note in notes if note.get('loads') == event.start)
        assert set(experts_of(job, rank)) <= event.versions.keys()
        for name, state in loaded.items():
            assert state == captured[event.versions.get(name, event.start)][name], name
    return {version for event in lost.values() for version in event.versions.values()}


def notes_of(job: Cluster, rank: int) -> list[dict]:
    lines = (job.directory / 'events' / f'rank{rank}.notes').read_text().splitlines()
    return [json.loads(line) for line in lines]


def recounted(job: Cluster, rank: int, event: TokensLost) -> float:
    """Tokens lost, by the routing maps of the iterations before the failure."""
    tokens = {
        note['routed']: note['tokens'] for note in notes_of(job, rank)[::-1] if 'routed' in note
    }
    layers = list(dict.fromkeys(name.rpartition('.')[0] for name in event.versions))
    return sum(
        tokens[iteration][layers.index(layer)][int(expert.removeprefix('expert'))]
        for name, version in event.versions.items()
        for layer, _, expert in [name.rpartition('.')]
        for iteration in range(version + 1, event.start + 1)
    )


def test_experts_have_the_versions_in_the_header(cluster: Make, reference: Reference) -> None:
    job = cluster(*flags_of(BASE), *MOC, '1')
    lost = survived(job, 'mutations.experts:states_are_noted')
    versions = check_versions(job, lost)
    assert len(versions) > 1 and max(versions) == START
    for rank, event in lost.items():
        assert event.tokens == recounted(job, rank, event) > 0
    assert all(event.share > 0 for event in lost.values())
    assert differences(reference(*flags_of(BASE)), read_digest(job)) != []
    recovered = [event for rank in range(job.ranks) for event in job.events_of(Recovered, rank)]
    assert any('gradient norm' in name for event in recovered for name in event.differing)


def test_wrong_step_counts_are_detected(cluster: Make) -> None:
    job = cluster(*flags_of(BASE), *MOC, '1')
    lost = survived(job, 'mutations.experts:step_is_forgotten')
    with pytest.raises(AssertionError):
        check_versions(job, lost)


def test_experts_with_the_largest_loss_are_saved_each_iteration(cluster: Make) -> None:
    """The budgets of this machine carry all experts after some iterations, and one before."""
    job = cluster(*flags_of(BASE), '--sparse-ckpt-strategy', 'moetion')
    noted = 'mutations.experts:states_are_noted'
    assert job.survive(fail_at=f'1:{TARGET + 1}:forward', mutation=noted) == {1: 1}
    lost = {rank: job.events_of(TokensLost, rank)[0] for rank in range(job.ranks)}
    (start,) = {event.start for event in lost.values()}
    versions = check_versions(job, lost)
    assert max(versions) == start
    for rank, event in lost.items():
        assert event.tokens == recounted(job, rank, event)
    assert {event.interval for event in job.events_of(Protected, 0)} == {1}
