# SPDX-License-Identifier: Apache-2.0
"""Windows of which the holders have a part already, from an earlier window of the owner."""

import pytest

from moevement_ext.memory.window import file as window_file
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.slot import Kept, Range, encode_frame, merged
from moevement_ext.replicate.client import PeerRefused, ReplicaClient
from moevement_ext.replicate.replica_server import ReplicaServer
from tests.unit.memory.samples import content, digest, make_header, named
from tests.unit.replicate.peers import OWNER, put_window, replica_starts, replicas

RANGES: list[Range] = [(0, 64, 64), (192, 128, 64)]

pytestmark = pytest.mark.timed


def commit_slot(own: OwnerWindows, start: int, base: WindowFile | None = None) -> WindowFile:
    """A window of one slot; with a base, `RANGES` are those of its payload."""
    file = own.begin(named(start))
    assert file is not None
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


def test_another_window_in_the_same_file_keeps_nothing(own: OwnerWindows) -> None:
    file = commit_slot(own, 3, commit_slot(own, 0))
    own.discard(named(3))
    file.begin(named(6))
    assert file.kept is None


def test_adjacent_ranges_are_merged() -> None:
    assert merged([(0, 64, 64), (64, 128, 64), (128, 256, 64), (256, 320, 64)]) == [
        (0, 64, 128),
        (128, 256, 64),
        (256, 320, 64),
    ]
