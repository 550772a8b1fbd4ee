# SPDX-License-Identifier: Apache-2.0
"""Replicas that are damaged in the memory of their holders: each is compared when it is read."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from moevement_ext.memory.window.name import RankIdentity, Window
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.recover.sources import verified_window
from moevement_ext.recover.whole_job import Predecessor, obtain
from tests.unit.memory.samples import RUN, TOPOLOGY, WINDOW, digest, named, tmpfs_directory
from tests.unit.replicate.peers import put_window
from tests.unit.replicate.test_host_memory import CANDIDATE, Job

OWN = RankIdentity(RUN, TOPOLOGY, 0)
NEXT = Window(named(WINDOW), WINDOW)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """Rank 0 and two holders of its replicas."""
    with tmpfs_directory() as shm:
        job = Job(Path(shm), monkeypatch, ('node-a', 'node-b', 'node-c'))
        yield job
        job.stop()


def lose(job: Job, start: int, damaged: tuple[int, ...]) -> str:
    """A window that rank 0 has no more, with damaged replicas at some holders.

    Returns:
        What it was.
    """
    file = job.commit(0, start)
    before = digest(file.path)
    for holder, client in job.ranks[0].peers().items():
        put_window(client, file)
        client.close()
        if holder in damaged:
            held = job.ranks[holder]._inboxes[0].windows.file(named(start))
            assert held is not None
            payload = held.payload(1)
            payload.flags.writeable = True
            payload[0] ^= 1
    job.ranks[0].windows.discard(named(start))
    return before


def test_second_holder_replaces_a_damaged_replica(job: Job) -> None:
    before = lose(job, 0, damaged=(1,))
    file, source = verified_window(job.ranks[0], CANDIDATE, job.inventories(), OWN)
    assert (source, digest(file.path)) == ('rank 2', before)


def test_an_older_window_is_taken_where_every_replica_is_damaged(job: Job) -> None:
    before = lose(job, 0, damaged=())
    lose(job, WINDOW, damaged=(1, 2))
    with pytest.raises(RefusedWindow, match='rank 1: .*slot 1: checksum.*rank 2: .*slot 1: chec'):
        verified_window(job.ranks[0], NEXT, job.inventories(), OWN)
    exchange = SimpleNamespace(all_agree=lambda name, mine: mine)
    events = SimpleNamespace(emit=lambda event: None)
    rank = SimpleNamespace(number=0, identity=OWN, exchange=exchange, events=events)
    predecessor = Predecessor(job.inventories(), [], [NEXT, CANDIDATE], 3, -1)
    found = obtain(job.ranks[0], predecessor, rank, lambda header: None)  # type: ignore[arg-type]
    assert found is not None and found.tier == 'rank 1'
    file = job.ranks[0].windows.file(named(0))
    assert file is not None and digest(file.path) == before
