# SPDX-License-Identifier: Apache-2.0
"""Replicas that their holders committed without comparing bytes are compared when they are read."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from moevement_ext.memory.window.name import RankIdentity, Window
from moevement_ext.memory.window.refused import RefusedWindow
from moevement_ext.recover.sources import verified_window
from moevement_ext.recover.whole_job import Predecessor, obtain
from moevement_ext.replicate.client import PeerRefused
from tests.unit.memory.samples import RUN, TOPOLOGY, WINDOW, digest, named, tmpfs_directory
from tests.unit.replicate.peers import put_window
from tests.unit.replicate.test_host_memory import CANDIDATE, Job

OWN = RankIdentity(RUN, TOPOLOGY, 0)
NEXT = Window(named(WINDOW), WINDOW)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """Rank 0 and two holders of its replicas, which compare one window in three."""
    with tmpfs_directory() as shm:
        job = Job(Path(shm), monkeypatch, ('node-a', 'node-b', 'node-c'), verify_replicas=3)
        yield job
        job.stop()


def lose(job: Job, start: int, damaged: tuple[int, ...]) -> str:
    """A window that rank 0 has no more, with replicas damaged on the way to some holders.

    Returns:
        What it was.
    """
    file = job.commit(0, start)
    before = digest(file.path)
    payload = file.payload(1)
    payload.flags.writeable = True
    for holder, client in job.ranks[0].peers().items():
        payload[0] ^= holder in damaged
        put_window(client, file)
        payload[0] ^= holder in damaged
        client.close()
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


def test_every_third_window_is_verified_before_its_commit(job: Job) -> None:
    lose(job, 0, damaged=(1, 2))
    lose(job, WINDOW, damaged=(1, 2))
    file = job.commit(0, 2 * WINDOW)
    file.payload(2)[0] ^= 1
    client = job.ranks[0].peers()[1]
    client.discard_after(0, 0)
    for _ in range(2):  # it is compared until one passes
        with pytest.raises(PeerRefused, match='CorruptWindow: .*slot 2: checksum'):
            put_window(client, file)
    file.payload(2)[0] ^= 1
    put_window(client, file)
    client.discard_after(0, 0)
    file.payload(2)[0] ^= 1
    put_window(client, file)  # the next two are not compared
    client.close()
