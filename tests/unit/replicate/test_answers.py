# SPDX-License-Identifier: Apache-2.0
"""A peer whose answers are damaged on the way, or too large, or not what was asked for."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import xxhash

from moevement_ext.memory.shelf import Part
from moevement_ext.memory.upstream_log.record import CorruptLog, Direction, LoggedTensor, LogKey
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import PREAMBLE_BYTES
from moevement_ext.memory.window.name import Window
from moevement_ext.memory.window.refusal import CorruptWindow, RefusedWindow
from moevement_ext.memory.window.slot import encode_frame
from moevement_ext.replicate.client import ReplicaClient
from moevement_ext.replicate.connection import Connection
from moevement_ext.replicate.protocol import Ack, LogHead, RangesHead, Reply, SlotHead, WindowHead
from moevement_ext.replicate.secret import admit
from tests.unit.memory.samples import SECRET, WINDOW, capacity, make_file, make_header, named
from tests.unit.replicate.peers import DEADLINE_S, OWNER

pytestmark = pytest.mark.timed

PART = Part('run.aaaaaaaa', Window(named(0), WINDOW), OWNER, on_disk=False)
BYTES = b'of a record of another layout'
FRAME = encode_frame(make_header(0))

Answers = Callable[..., tuple[str, int]]


@pytest.fixture
def answering() -> Iterator[Answers]:
    """Address of a peer that gives these answers, or bytes, to its first request."""
    listeners: list[socket.socket] = []

    def start(*answers: Reply | bytes) -> tuple[str, int]:
        listener = socket.create_server(('127.0.0.1', 0))
        listeners.append(listener)

        def serve() -> None:
            with suppress(OSError):  # the client may leave before all is sent
                connection = Connection(listener.accept()[0])
                connection.set_deadline(DEADLINE_S)
                admit(connection, SECRET)
                connection.receive_request()
                for answer in answers:
                    if isinstance(answer, bytes):
                        connection.send_bytes(answer)
                    else:
                        connection.send(answer)
                connection.close()

        threading.Thread(target=serve, daemon=True).start()
        address: tuple[str, int] = listener.getsockname()
        return address

    yield start
    for listener in listeners:
        listener.close()


def ranges_from(address: tuple[str, int]) -> bytes:
    into = bytearray(len(BYTES))
    client = ReplicaClient(address, SECRET, DEADLINE_S)
    client.fetch_ranges(PART, 0, [(0, 0, len(BYTES))], [memoryview(into)])
    client.close()
    return bytes(into)


def test_ranges_arrive_as_they_are_sent(answering: Answers) -> None:
    head = RangesHead(len(BYTES), xxhash.xxh3_64_intdigest(BYTES))
    assert ranges_from(answering(head, BYTES)) == BYTES


@pytest.mark.parametrize(
    ('announced', 'sent', 'refusal'),
    [
        (len(BYTES), BYTES[::-1], 'are damaged: checksum mismatch'),
        (len(BYTES) + 1, BYTES + b'.', 'peer announces'),
    ],
    ids=['damaged', 'longer'],
)
def test_damaged_ranges_are_refused(
    announced: int, sent: bytes, refusal: str, answering: Answers
) -> None:
    """Else they are sealed into a window with checksums of their own."""
    head = RangesHead(announced, xxhash.xxh3_64_intdigest(BYTES))
    with pytest.raises(RefusedWindow, match=refusal):
        ranges_from(answering(head, sent))


def headers_of(slots: list[int]) -> list[Reply | bytes]:
    frames = [encode_frame(make_header(slot)) for slot in slots]
    heads = [SlotHead(slot, 0, len(frame)) for slot, frame in zip(slots, frames, strict=True)]
    sent: list[Reply | bytes] = [WindowHead(len(slots), sum(map(len, frames)))]
    for head, frame in zip(heads, frames, strict=True):
        sent += [head, frame]
    return [*sent, Ack()]


@pytest.mark.parametrize('slots', [[0, 1], [0, 2], [0, 1, 1], [1, 0, 2], [0, 1, 2, 2]])
def test_part_of_a_window_without_its_slots_is_refused(
    slots: list[int], answering: Answers
) -> None:
    client = ReplicaClient(answering(*headers_of(slots)), SECRET, DEADLINE_S)
    with pytest.raises(RefusedWindow, match='window 0 of rank 0 is not whole'):
        client.fetch_part(PART)


def test_part_of_a_window_with_its_slots_is_taken(answering: Answers) -> None:
    client = ReplicaClient(answering(*headers_of([*range(WINDOW)])), SECRET, DEADLINE_S)
    assert [header.slot for header in client.fetch_part(PART)] == [*range(WINDOW)]
    client.close()


@pytest.mark.parametrize('head', [WindowHead(10**6, 10**6), WindowHead(1, 2**40)])
def test_more_headers_than_windows_have_are_refused(head: WindowHead, answering: Answers) -> None:
    """Else a peer could fill the memory of this rank."""
    client = ReplicaClient(answering(head), SECRET, DEADLINE_S)
    with pytest.raises(RefusedWindow, match='headers of .* bytes are too many'):
        client.fetch_headers(OWNER, 0)


def test_damaged_header_is_refused(answering: Answers) -> None:
    damaged = FRAME[:-1] + bytes([FRAME[-1] ^ 1])
    head = WindowHead(1, len(FRAME)), SlotHead(0, 0, len(FRAME))
    client = ReplicaClient(answering(*head, damaged, Ack()), SECRET, DEADLINE_S)
    with pytest.raises(RefusedWindow, match='a header is damaged'):
        client.fetch_headers(OWNER, 0)


def test_record_larger_than_any_of_the_log_is_refused(answering: Answers) -> None:
    key = LogKey(1, Direction.DOWN, 0)
    tensor = LoggedTensor('float32', (2**20,), 2**22, 0)
    client = ReplicaClient(answering(LogHead(tensor)), SECRET, DEADLINE_S)
    client._max_record_bytes = 2**10
    with pytest.raises(CorruptLog, match='the peer announces 4194304 bytes, but no record'):
        client.fetch_log(key)


def test_damaged_record_is_refused(answering: Answers) -> None:
    head = LogHead(LoggedTensor('uint8', (4,), 4, 12345))
    client = ReplicaClient(answering(head, b'abcd'), SECRET, DEADLINE_S)
    with pytest.raises(CorruptLog, match=r'tensor 0 sent down in iteration 1, from peer 127\.'):
        client.fetch_log(LogKey(1, Direction.DOWN, 0))


def test_damaged_window_is_refused(answering: Answers, shm: Path) -> None:
    source = make_file(shm / 'w')
    sent: list[Reply | bytes] = [WindowHead(WINDOW, source.used_bytes() - PREAMBLE_BYTES)]
    for slot in source.slots():
        payload, frame = map(bytearray, source.slot_blob(slot))
        payload[0] ^= slot == 1
        sent += [SlotHead(slot, len(payload), len(frame)), bytes(frame + payload)]
    into = WindowFile.create(shm / 'into', capacity())
    client = ReplicaClient(answering(*sent, Ack()), SECRET, DEADLINE_S)
    with pytest.raises(CorruptWindow, match='into: slot 1: .*operator expert-0'):
        client.fetch_window(OWNER, named(0), into)
