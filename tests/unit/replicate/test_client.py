# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from moevement_ext.errors import HostMemoryError
from moevement_ext.memory.window import file as window_file
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.slot import Kept, Range, encode_frame
from moevement_ext.replicate.client import PeerRefused, ReplicaClient
from moevement_ext.replicate.replica_server import ReplicaServer
from tests.unit.memory.samples import (
    WINDOW,
    begun,
    capacity,
    commit,
    content,
    digest,
    make_file,
    make_header,
    named,
    write_window,
)
from tests.unit.replicate.peers import OWNER, own_file, put_window, replica_starts, replicas, stored

pytestmark = pytest.mark.timed


def test_everything_may_be_repeated(
    own: OwnerWindows, server: ReplicaServer, client: ReplicaClient
) -> None:
    file = commit(own, 0)
    client.put_slot(OWNER, file, 0)
    client.put_slot(OWNER, file, 0)
    for _ in range(2):
        put_window(client, file)
        assert digest(replicas(server).committed()[0].path) == digest(file.path)
    assert replica_starts(server) == [0]


def test_incomplete_window_is_not_committed(
    shm: Path, own: OwnerWindows, client: ReplicaClient
) -> None:
    file = commit(own, 0)
    client.put_slot(OWNER, file, 1)
    with pytest.raises(PeerRefused, match=r'has slots \[1\] of a window of 3'):
        client.commit(OWNER, named(0))
    with pytest.raises(PeerRefused, match='was not received'):
        client.commit(OWNER, named(3))
    assert stored(shm) == []


def test_corrupt_payload_is_not_committed(
    shm: Path, own: OwnerWindows, client: ReplicaClient
) -> None:
    file = commit(own, 0)
    file.payload(2)[0] ^= 1  # as if damaged on the way
    with pytest.raises(PeerRefused, match='CorruptWindow.*slot 2.*operator expert-0'):
        put_window(client, file)
    assert stored(shm) == []
    file.payload(2)[0] ^= 1
    put_window(client, file)
    assert stored(shm) == [(OWNER, named(0))]


def test_window_of_another_owner_is_not_committed(shm: Path, client: ReplicaClient) -> None:
    file = make_file(shm / 'w', owner=7)
    with pytest.raises(PeerRefused, match='WrongWindow: .*owner is 7, expected 0'):
        put_window(client, file)
    with pytest.raises(PeerRefused, match='no replicas of rank 7'):
        put_window(client, file, owner=7)


def test_old_replica_stays_served_until_the_new_one_is_complete(
    own: OwnerWindows, shm: Path, server: ReplicaServer, client: ReplicaClient
) -> None:
    put_window(client, commit(own, 0))
    [old] = replicas(server).committed()
    before = digest(old.path)
    new = commit(own, 3)
    for slot in new.slots():
        client.put_slot(OWNER, new, slot)
        assert stored(shm) == [(OWNER, named(0))]
        assert digest(old.path) == before
    client.commit(OWNER, named(3))
    assert replica_starts(server) == [3, 0]


def test_replicas_are_recycled_only_when_outdated(
    own: OwnerWindows, server: ReplicaServer, client: ReplicaClient
) -> None:
    for start in (0, 3):
        put_window(client, commit(own, start), named(0))
    with pytest.raises(PeerRefused, match='no free file for window 6-plan1 of rank 0'):
        put_window(client, commit(own, 6))
    assert replica_starts(server) == [3, 0]
    put_window(client, own_file(own, 6), named(3))
    assert replica_starts(server) == [6, 3]


def altered_window(shm: Path, start: int) -> WindowFile:
    """A window of the same name, but not with the same bits."""
    file = WindowFile.create(shm / 'altered', capacity())
    file.begin(named(start))
    for slot in range(WINDOW):
        header = make_header(slot, start)
        file.reserve_slot(slot, header.payload_bytes)[:] = 7
        file.seal_slot(header)
    return file


def test_partly_received_window_gives_way_to_one_with_other_content(
    shm: Path, own: OwnerWindows, server: ReplicaServer, client: ReplicaClient
) -> None:
    """The owner has captured it again; else this holder would refuse its windows for ever."""
    client.put_slot(OWNER, commit(own, 3), 0)
    altered = altered_window(shm, 3)
    put_window(client, altered)
    [replica] = replicas(server).committed()
    assert (replica.name, digest(replica.path)) == (named(3), digest(altered.path))


def test_newest_capture_replaces_the_copy_of_an_earlier_one(
    shm: Path, own: OwnerWindows, server: ReplicaServer, client: ReplicaClient
) -> None:
    """Its other slots must not be joined with those of the other ranks of the stage."""
    put_window(client, commit(own, 3))
    altered = altered_window(shm, 3)
    client.put_slot(OWNER, altered, 0)
    assert replica_starts(server) == [], 'a half of each is no copy'
    put_window(client, altered)
    [replica] = replicas(server).committed()
    assert digest(replica.path) == digest(altered.path)


def test_rollback_replaces_the_abandoned_past(
    shm: Path, own: OwnerWindows, server: ReplicaServer, client: ReplicaClient
) -> None:
    for start in (0, 3):
        put_window(client, commit(own, start))
    altered = altered_window(shm, 3)
    client.discard_after(OWNER, 0)
    assert replica_starts(server) == [0]
    put_window(client, altered)
    assert replica_starts(server) == [3, 0]
    fetched = begun(own, 6)
    assert client.fetch_window(OWNER, named(3), fetched) == altered.headers()


def test_window_larger_than_the_replica_files_has_one_of_its_own_if_there_is_room(
    shm: Path, server: ReplicaServer, client: ReplicaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = WindowFile.create(shm / 'w', 2 * capacity(20))
    file.begin(named(0))
    write_window(file, window=20)

    def no_room(path: Path, nbytes: int) -> WindowFile:
        raise HostMemoryError(f'{path}: no room for {nbytes} bytes')

    with monkeypatch.context() as full:
        full.setattr(WindowFile, 'create', no_room)
        with pytest.raises(PeerRefused, match='HostMemoryError'):
            put_window(client, file)
    assert stored(shm) == []
    put_window(client, file)
    assert replica_starts(server) == [0]


RANGES: list[Range] = [(0, 64, 64), (192, 128, 64)]


def commit_slot(own: OwnerWindows, start: int, base: WindowFile | None = None) -> WindowFile:
    """A window of one slot; with a base, `RANGES` are those of its payload."""
    file = begun(own, start)
    header = make_header(0, start, window=1)
    payload = file.reserve_slot(0, header.payload_bytes)
    payload[:] = content(header)
    if base is not None:
        file.kept = Kept(base.required_name(), RANGES)
        file.kept.copy(base.payload(0), payload)
    file.seal_slot(header)
    own.commit(file)
    return file


def frame_bytes(file: WindowFile) -> int:
    return len(encode_frame(file.header(0)))


@pytest.mark.parametrize('piece_bytes', [1, 100, 2**18])
def test_only_the_rest_is_sent(
    piece_bytes: int,
    own: OwnerWindows,
    server: ReplicaServer,
    client: ReplicaClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(window_file, 'PIECE_BYTES', piece_bytes)
    base = commit_slot(own, 0)
    put_window(client, base)
    file = commit_slot(own, 3, base)
    sent = client.put_slot(OWNER, file, 0)
    assert sent == file.payload(0).size - 128 + frame_bytes(file)
    client.commit(OWNER, named(3))
    (newest, _) = replicas(server).committed()
    assert digest(newest.path) == digest(file.path)


def test_a_holder_without_the_earlier_window_is_sent_all(
    own: OwnerWindows, server: ReplicaServer, client: ReplicaClient
) -> None:
    file = commit_slot(own, 3, commit_slot(own, 0))
    assert client.put_slot(OWNER, file, 0) == file.payload(0).size + frame_bytes(file)
    client.commit(OWNER, named(3))
    assert digest(replicas(server).committed()[0].path) == digest(file.path)


def test_ranges_damaged_at_the_holder_are_sent(
    own: OwnerWindows, server: ReplicaServer, client: ReplicaClient
) -> None:
    base = commit_slot(own, 0)
    put_window(client, base)
    held = replicas(server).file(named(0))
    assert held is not None
    held.payload(0)[64:128] ^= 1
    file = commit_slot(own, 3, base)
    with pytest.raises(PeerRefused, match='checksum mismatch'):
        put_window(client, file)
    put_window(client, file)
    assert digest(replicas(server).committed()[0].path) == digest(file.path)


@pytest.mark.parametrize(
    'ranges',
    [[(64, 0, 64), (0, 0, 64)], [(0, 0, 2**40)], [(0, 2**40, 64)], [(0, 0, 65), (64, 0, 1)]],
)
def test_impossible_ranges_are_refused(
    ranges: list[Range], own: OwnerWindows, server: ReplicaServer, client: ReplicaClient
) -> None:
    base = commit_slot(own, 0)
    put_window(client, base)
    file = commit_slot(own, 3, base)
    file.kept = Kept(named(0), ranges)
    with pytest.raises(PeerRefused, match='out of order'):
        client.put_slot(OWNER, file, 0)
    file.kept = None
    put_window(client, file)
    assert replica_starts(server) == [3, 0]
