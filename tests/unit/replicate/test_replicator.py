# SPDX-License-Identifier: Apache-2.0
import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import Agreed, WindowName
from moevement_ext.plan.windows import spread
from moevement_ext.rates import TokenBucket
from moevement_ext.replicate import client, replicator
from moevement_ext.replicate.client import ReplicaClient
from moevement_ext.replicate.replica_server import ReplicaServer
from moevement_ext.replicate.replicator import Replicator
from tests.distributed.harness.ports import free_port
from tests.unit.memory.samples import SECRET, WINDOW, begun, commit, digest, named, write_slot
from tests.unit.replicate.peers import (
    DEADLINE_S,
    OWNER,
    SlowPeer,
    own_file,
    replica_starts,
    replicas,
    serving,
    silent_peer,
    stored,
    wait_for,
)
from tests.unit.test_rates import Time

pytestmark = pytest.mark.timed


class Events:
    def __init__(self) -> None:
        self.replicated: queue.Queue[WindowName] = queue.Queue()
        self.degraded: queue.Queue[str] = queue.Queue()

    def next_replicated(self) -> WindowName:
        return self.replicated.get(timeout=DEADLINE_S)

    def next_degraded(self) -> str:
        return self.degraded.get(timeout=DEADLINE_S)


@contextmanager
def replicating(
    events: Events, *addresses: tuple[str, int], timeout_s: float = DEADLINE_S
) -> Iterator[Replicator]:
    clients = {
        rank: ReplicaClient(address, SECRET, timeout_s) for rank, address in enumerate(addresses, 1)
    }
    replicator = Replicator(
        OWNER,
        clients,
        events.replicated.put,
        events.degraded.put,
    )
    try:
        yield replicator
    finally:
        replicator.stop()


def submit_all(replicator: Replicator, file: WindowFile) -> None:
    for slot in file.slots():
        replicator.submit(file, slot)


def test_slots_are_sent_as_they_are_sealed(shm: Path, own: OwnerWindows) -> None:
    events = Events()
    with (
        serving(shm, 1) as first,
        serving(shm, 2) as second,
        replicating(events, first.address, second.address) as replicator,
    ):
        for start in range(0, 15, 3):
            file = begun(own, start)
            for slot in range(WINDOW):
                write_slot(file, slot)
                replicator.submit(file, slot)
            own.commit(file)
            assert events.next_replicated() == named(start)
            assert replica_starts(first)[0] == replica_starts(second)[0] == start
            own.persisted(named(start))
            replicator.agree(Agreed(named(start)))
        assert events.degraded.empty()
        newest = own.committed()[0].path
        assert digest(replicas(first).committed()[0].path) == digest(newest)


def test_rate_counts_sent_bytes(shm: Path, own: OwnerWindows) -> None:
    events = Events()
    with serving(shm, 1) as server, replicating(events, server.address) as replicator:
        assert replicator.bytes_per_s() is None
        file = commit(own, 0)
        submit_all(replicator, file)
        assert events.next_replicated() == named(0)
        rate = replicator.bytes_per_s()
        assert rate is not None and rate > 0
        submit_all(replicator, file)  # the peer has it already
        assert events.next_replicated() == named(0)
        assert replicator.bytes_per_s() == rate


def test_lost_peer_is_reported_and_catches_up_on_its_return(shm: Path, own: OwnerWindows) -> None:
    events = Events()
    port = free_port()
    with (
        serving(shm, 1) as alive,
        replicating(events, alive.address, ('127.0.0.1', port)) as replicator,
    ):
        submit_all(replicator, commit(own, 0))
        assert f'replica on rank 2: peer 127.0.0.1:{port} is lost' in events.next_degraded()
        assert events.replicated.empty()
        with serving(shm, 2, port) as back:
            assert events.next_replicated() == named(0)
            assert replica_starts(alive) == replica_starts(back) == [0]


def test_slots_lost_by_a_peer_are_resent(shm: Path, own: OwnerWindows) -> None:
    events = Events()
    file = begun(own, 0)
    port = free_port()
    with replicating(events, ('127.0.0.1', port)) as replicator:
        with serving(shm, 1, port) as before:
            write_slot(file, 0)
            replicator.submit(file, 0)
            [received] = wait_for(lambda: list(replicas(before).path.glob('writing-*')))
            wait_for(lambda: WindowFile.open(received).slots())
        with serving(shm, 1, port) as after:
            for slot in (1, 2):
                write_slot(file, slot)
                replicator.submit(file, slot)
            assert events.next_replicated() == named(0)
            assert replica_starts(after) == [0]


def test_repeatedly_refused_window_is_resent_less_and_less_often(
    shm: Path, own: OwnerWindows
) -> None:
    events = Events()
    with serving(shm, 1) as server, replicating(events, server.address) as replicator:
        file = commit(own, 0)
        damaged = file.payload(WINDOW - 1)
        damaged.flags.writeable = True
        damaged[0] ^= 0xFF
        submit_all(replicator, file)
        said = [events.next_degraded() for _ in range(4)]
    assert [text.rpartition('next attempt in ')[2] for text in said] == [
        '0.1 s', '0.2 s', '0.4 s', '0.8 s',
    ]  # fmt: skip


def test_submit_never_blocks_on_a_silent_peer(shm: Path, own: OwnerWindows) -> None:
    events, timeout_s = Events(), 4.0
    with (
        silent_peer(greets=True) as address,
        replicating(events, address, timeout_s=timeout_s) as sender,
    ):
        began = time.monotonic()
        for start in (0, 3, 6):
            submit_all(sender, commit(own, start))
        assert time.monotonic() - began < timeout_s, 'one of them waited'
        reports = {events.next_degraded() for _ in range(2)}
        assert any('window 0 was given up' in report for report in reports)
        assert any('is lost' in report for report in reports)


def test_recycled_source_is_not_sent_as_the_old_window(shm: Path, own: OwnerWindows) -> None:
    events = Events()
    port = free_port()
    with replicating(events, ('127.0.0.1', port)) as replicator:
        file = commit(own, 0)
        submit_all(replicator, file)
        assert 'is lost' in events.next_degraded()
        own.persisted(named(3))
        taken = [commit(own, start) for start in (3, 6, 9, 12)]
        assert file in taken
        with serving(shm, 1, port) as server:
            wait_for(lambda: 'was recycled' in events.next_degraded())
            assert replica_starts(server) == []
            submit_all(replicator, own_file(own, 9))
            assert events.next_replicated() == named(9)


def test_a_window_that_is_given_up_is_sent_no_further(shm: Path, own: OwnerWindows) -> None:
    events = Events()
    with serving(shm, 1) as server, replicating(events, server.address) as replicator:
        for start in (0, 3):
            submit_all(replicator, commit(own, start))
            assert events.next_replicated() == named(start)
        replicator.agree(Agreed(named(0), (3, 6)))
        submit_all(replicator, commit(own, 6))
        submit_all(replicator, commit(own, 9))
        assert events.next_replicated() == named(9)
        assert replica_starts(server) == [9, 0]
        assert events.degraded.empty()


def test_new_peer_of_a_rank_is_told_what_the_former_was_not(shm: Path, own: OwnerWindows) -> None:
    """Else it keeps windows of an abandoned history."""
    events = Events()
    with serving(shm, 1) as server, replicating(events, server.address) as replicator:
        for start in (0, 3):
            submit_all(replicator, commit(own, start))
            assert events.next_replicated() == named(start)
        replicator.set_peers({1: ReplicaClient(('127.0.0.1', free_port()), SECRET, DEADLINE_S)})
        replicator.discard_after(0)
        assert 'is lost' in events.next_degraded()
        replicator.set_peers({1: ReplicaClient(server.address, SECRET, DEADLINE_S)})
        wait_for(lambda: replica_starts(server) == [0])


def test_new_peers_take_over_from_one_that_does_not_answer(shm: Path, own: OwnerWindows) -> None:
    events = Events()
    with silent_peer(greets=True) as address, serving(shm, 1) as server:
        with replicating(events, address, timeout_s=1000.0) as replicator:
            client = replicator._peers[1].client
            file = commit(own, 0)
            submit_all(replicator, file)
            wait_for(lambda: client._connection is not None)
            new = {1: ReplicaClient(server.address, SECRET, DEADLINE_S)}
            replicator.set_peers(new, [file])
            assert events.next_replicated() == named(0)
    assert events.degraded.empty(), 'of a peer that is one no more'


def test_the_window_under_way_outlasts_older_ones_that_new_peers_are_offered(
    shm: Path, own: OwnerWindows
) -> None:
    """Where windows go to disk as well, two files hold older ones."""
    events = Events()
    with serving(shm, 1) as lost, replicating(events, lost.address) as replicator:
        for start in (0, 3):
            submit_all(replicator, commit(own, start))
            assert events.next_replicated() == named(start)
        replicator.agree(Agreed(named(3)))
        own.persisted(named(3))
        under_way = begun(own, 6)
        write_slot(under_way, 0)
        replicator.submit(under_way, 0)
        wait_for(lambda: receiving(lost) == [0])
        with serving(shm, 2) as new:
            peers = {2: ReplicaClient(new.address, SECRET, DEADLINE_S)}
            replicator.set_peers(peers, [own_file(own, start) for start in (0, 3)])
            assert events.next_replicated() == named(3)
            for slot in range(1, WINDOW):
                write_slot(under_way, slot)
                replicator.submit(under_way, slot)
            own.commit(under_way)
            assert events.next_replicated() == named(6)
            assert replica_starts(new) == [6, 3]
        assert events.degraded.empty()


def test_commit_answered_after_a_rollback_does_not_count_for_the_next_capture(
    own: OwnerWindows,
) -> None:
    """Else the window captured anew, of the same name, would count without a replica."""
    events, peer = Events(), SlowPeer()
    replicator = Replicator(OWNER, {1: peer}, events.replicated.put, events.degraded.put)
    submit_all(replicator, commit(own, 3))
    assert peer.next_asked() == named(3)
    replicator.discard_after(0)
    peer.answers.set()
    assert peer.next_asked() == 0
    own.discard_after(0)
    submit_all(replicator, commit(own, 3))
    assert events.next_replicated() == named(3)
    replicator.stop()
    assert not peer._asked.empty(), 'it is reported without a second commit'
    assert peer.next_asked() == named(3)


def test_window_dropped_by_a_rollback_is_not_reported(own: OwnerWindows) -> None:
    """Else it would count for an abandoned capture, after its withdrawal."""
    events = Events()
    replicator = Replicator(OWNER, {}, events.replicated.put, events.degraded.put)
    replicator.stop()
    submit_all(replicator, commit(own, 3))
    tell = replicator._next_action()
    assert tell is not None
    replicator.discard_after(0)
    tell()
    assert events.replicated.empty()


def test_earlier_of_two_rollbacks_reaches_a_busy_peer(own: OwnerWindows) -> None:
    """Else it keeps windows of the abandoned history, and refuses the new ones."""
    events, peer = Events(), SlowPeer()
    replicator = Replicator(OWNER, {1: peer}, events.replicated.put, events.degraded.put)
    submit_all(replicator, commit(own, 9))
    assert peer.next_asked() == named(9)
    for start in (0, 6):
        replicator.discard_after(start)
    peer.answers.set()
    assert peer.next_asked() == 0
    replicator.stop()


def test_a_replica_whose_file_was_removed_is_sent_again(shm: Path, own: OwnerWindows) -> None:
    events = Events()
    with serving(shm) as server, replicating(events, server.address) as replicator:
        file = begun(own, 0)
        for slot in range(WINDOW - 1):
            write_slot(file, slot)
            replicator.submit(file, slot)
        folder = replicas(server).path
        wait_for(lambda: len(receiving(server)) == WINDOW - 1)
        for path in folder.glob('writing-*'):
            path.unlink()
        write_slot(file, WINDOW - 1)
        own.commit(file)
        replicator.submit(file, WINDOW - 1)
        assert events.next_replicated() == named(0)
        assert 'cannot be committed: No such file' in events.next_degraded()
        assert [name for _, name in stored(shm)] == [named(0)]


def receiving(server: ReplicaServer) -> list[int]:
    file = server._inboxes[OWNER]._receiving
    return [] if file is None else file.slots()


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


def test_slots_are_spread_over_their_window(
    shm: Path, own: OwnerWindows, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            file = begun(own, start)
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


def _wait_until_sent(sender: Replicator, slot: int) -> None:
    def sent() -> bool:
        with sender._changed:
            (peer,) = sender._peers.values()
            return not sender._jobs or any(key[1] == slot for key in peer.sent)

    wait_for(sent)
