# SPDX-License-Identifier: Apache-2.0
"""At which rate slots are sent: real peers, the test's own clock, and bytes that are counted."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.plan.windows import spread
from moevement_ext.replicate import client, replicator
from moevement_ext.replicate.client import ReplicaClient
from moevement_ext.replicate.replicator import Replicator
from moevement_ext.token_bucket import TokenBucket
from tests.unit.memory.samples import SECRET, WINDOW, commit, named, write_slot
from tests.unit.replicate.peers import (
    DEADLINE_S,
    OWNER,
    own_file,
    replica_starts,
    serving,
    wait_for,
)
from tests.unit.replicate.test_replicator import Events, submit_all
from tests.unit.test_token_bucket import Time

pytestmark = pytest.mark.timed

ITERATION_S = 10.0


class Link:
    """A replicator with one peer, and what it waits for its turn."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.events, self.time, self.chunks = Events(), Time(), list[int]()
        self.replicator = Replicator(
            OWNER,
            {1: ReplicaClient(address, SECRET, DEADLINE_S)},
            self.events.replicated.put,
            self.events.degraded.put,
        )
        bucket = TokenBucket(self.time.wait, 0, self.time.clock)
        take, self.replicator._bucket = bucket.take, bucket

        def counted(nbytes: int, rate: float | None) -> bool:
            self.chunks.append(nbytes)
            return take(nbytes, rate)

        bucket.take = counted  # type: ignore[method-assign]

    def waited_for(self, file: WindowFile) -> float:
        """Seconds that the slots of a window wait, submitted all at once."""
        before = self.time.now
        submit_all(self.replicator, file)
        assert self.events.next_replicated() == file.name
        return self.time.now - before


@contextmanager
def linked(shm: Path, rank: int = 1) -> Iterator[Link]:
    with serving(shm, rank) as server:
        link = Link(server.address)
        try:
            yield link
        finally:
            link.replicator.stop()


def nbytes(file: WindowFile) -> int:
    blobs = [file.slot_blob(slot) for slot in file.slots()]
    return sum(len(blob.payload) + len(blob.frame) for blob in blobs)


def test_rate_limit_holds_in_small_chunks(
    shm: Path, own: OwnerWindows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, 'CHUNK_BYTES', 64)
    with linked(shm) as link:
        link.replicator.limit = 100.0
        file = commit(own, 0)
        assert link.waited_for(file) == pytest.approx(nbytes(file) / 100.0)
        assert sum(link.chunks) == nbytes(file) and max(link.chunks) == 64
        assert link.replicator.bytes_per_s() is None, 'the link was not at its limit'
        link.replicator.limit = None
        assert link.waited_for(commit(own, 3)) == 0.0
        assert link.replicator.bytes_per_s() is not None


def test_recovery_is_not_throttled(shm: Path, own: OwnerWindows) -> None:
    with linked(shm) as link, serving(shm, 2) as new:
        link.replicator.limit = 1.0
        link.replicator.hurries = lambda: True
        assert link.waited_for(commit(own, 0)) == 0.0
        link.replicator.hurries = lambda: False
        peers = {2: ReplicaClient(new.address, SECRET, DEADLINE_S)}
        link.replicator.set_peers(peers, [own_file(own, 0)])
        assert link.events.next_replicated() == named(0)
        assert (replica_starts(new), link.time.now) == ([0], 100.0)
        assert link.waited_for(commit(own, 3)) > 100.0


def test_end_of_a_job_is_not_throttled(shm: Path, own: OwnerWindows) -> None:
    with serving(shm) as server:
        events = Events()
        peers = {1: ReplicaClient(server.address, SECRET, DEADLINE_S)}
        sender = Replicator(OWNER, peers, events.replicated.put, events.degraded.put)
        sender._bucket._burst, sender.limit = 0, 1e-6
        submit_all(sender, commit(own, 0))
        wait_for(lambda: sender._bucket.held_up)
        sender.stop()
        assert not sender._thread.is_alive()


def test_unwanted_slots_are_not_delayed(shm: Path, own: OwnerWindows) -> None:
    with linked(shm) as link:
        link.replicator.limit = 1.0
        file = commit(own, 0)
        job = replicator._Job(file, named(0), WINDOW)
        assert link.replicator._rate(job) is None
        link.replicator._jobs.append(job)
        assert link.replicator._rate(job) == 1.0
        link.replicator.abandon(named(0))
        assert link.replicator._rate(job) is None


def test_slots_are_spread_over_their_window(
    shm: Path, own: OwnerWindows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the sizes and times of the window before; its end goes at once."""
    monkeypatch.setattr(replicator, 'MIN_BYTES_PER_SECOND', 0)
    clock = Time()
    monkeypatch.setattr(
        replicator,
        'time',
        SimpleNamespace(
            monotonic=clock.clock, perf_counter=clock.clock, thread_time=time.thread_time
        ),
    )
    with linked(shm) as link:
        link.replicator.spreads = True
        sent = []
        for start in (0, 3):
            file = own.begin(named(start))
            assert file is not None
            for slot in range(WINDOW):
                clock.now += ITERATION_S
                write_slot(file, slot)
                before = link.time.now
                if slot == WINDOW - 1:
                    own.commit(file)
                link.replicator.submit(file, slot)
                _wait_until_sent(link.replicator, slot)
                sent.append(link.time.now - before)
            assert link.events.next_replicated() == named(start)
            own.persisted(named(start))
        sizes = [file.header(slot).payload_bytes for slot in range(WINDOW)]
        rate = spread(sizes, ITERATION_S, copies=1)
        blobs = [file.slot_blob(slot) for slot in range(WINDOW)]
        taken = [(len(blob.payload) + len(blob.frame)) / rate for blob in blobs]
        assert sent == [0, 0, 0, pytest.approx(taken[0]), pytest.approx(taken[1]), 0]
        assert max(sizes[:-1]) / rate < ITERATION_S


def test_no_peer_waits_longer_than_it_would_for_a_slow_link(shm: Path, own: OwnerWindows) -> None:
    """After a pause within a window slots would be spread over as much."""
    with linked(shm) as link:
        job = replicator._Job(commit(own, 0), named(0), WINDOW)
        link.replicator._jobs.append(job)
        link.replicator._spread = (WINDOW, 1e-3)
        assert link.replicator._rate(job) == 2 * replicator.MIN_BYTES_PER_SECOND
        link.replicator._spread = (WINDOW + 1, 1e9)
        assert link.replicator._rate(job) is None, 'a window of another length'
        link.replicator._jobs.clear()


def _wait_until_sent(sender: Replicator, slot: int) -> None:
    def sent() -> bool:
        with sender._changed:
            (peer,) = sender._peers.values()
            return not sender._jobs or any(key[1] == slot for key in peer.sent)

    wait_for(sent)
