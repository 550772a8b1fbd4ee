# SPDX-License-Identifier: Apache-2.0
"""A peer that captures the same bytes is a copy: it is sent what differs, and gives all back."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.memory.mapped_file import in_pages
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import GENERATIONS
from moevement_ext.memory.window.name import Agreed, HeldWindow, WindowName
from moevement_ext.memory.window.refusal import OtherBytes
from moevement_ext.recover.inventory import held_windows
from moevement_ext.recover.sources import verified_window
from moevement_ext.replicate.client import PeerRefused
from moevement_ext.replicate.host_memory import HostMemory
from moevement_ext.replicate.node_plan import Share
from moevement_ext.replicate.replicator import Replicator
from tests.unit.memory.samples import (
    WINDOW,
    begun,
    capacity,
    content,
    identity_of,
    make_header,
    named,
    tmpfs_directory,
)
from tests.unit.replicate.peers import host_memory_of, member_of, put_slots, put_window, wait_for
from tests.unit.replicate.test_host_memory import CANDIDATE

NODES = ('node-a', 'node-b')
OWN = 'weight1'
"""Ends the name of what each rank has for itself."""
OWN_PARTS = frozenset((f'decoder.layers.{slot}.{OWN}', 'master') for slot in range(WINDOW))
STUB = 2**17
SLOT = 5000


class Twins:
    """Two ranks on two emulated nodes that hold the same, but for some tensors and the context."""

    def __init__(self, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._shm, self._monkeypatch = shm, monkeypatch
        self.ranks: list[HostMemory] = []
        for rank in range(2):
            self.ranks.append(self._memory(rank))
        self._connect()

    def _memory(self, rank: int) -> HostMemory:
        self._monkeypatch.setenv('MOEVEMENT_NODE', NODES[rank])
        twin: dict[str, Any] = {'family': 0, 'stub_bytes': STUB, 'slot_bytes': SLOT}
        members = [member_of(node, domain=node, **twin) for node in NODES]
        share = Share(identity_of(rank), capacity(), own_parts=OWN_PARTS, **twin)
        config = SparseCheckpointConfig(dir=str(self._shm), window=1, replicas=1)
        return host_memory_of(config, members, share)

    def _connect(self) -> None:
        addresses = [msgspec.msgpack.encode(memory.server.address) for memory in self.ranks]
        for memory in self.ranks:
            memory.connect(lambda own: addresses)

    def lose_node(self, rank: int) -> HostMemory:
        """A new process in its place finds nothing."""
        self.ranks[rank].close(remove=False)
        shutil.rmtree(self._shm / 'run1' / NODES[rank])
        return self.begin_again(rank)

    def begin_again(self, rank: int) -> HostMemory:
        self.ranks[rank] = self._memory(rank)
        self._connect()
        return self.ranks[rank]

    def capture(self, rank: int, start: int = 0, differs: str = '') -> WindowFile:
        """A window of `rank`; `differs` ends the name of a tensor that it has otherwise."""
        windows = self.ranks[rank].windows
        file = begun(windows, start)
        for slot in range(WINDOW):
            header = make_header(slot, start, owner=rank)
            payload = content(make_header(slot, start)).copy()
            for record in header.records:
                if record.tensor.endswith(OWN) or (differs and record.tensor.endswith(differs)):
                    payload[record.offset : record.offset + record.nbytes] ^= rank
            header = msgspec.structs.replace(header, context=b'random state of %d' % rank)
            file.reserve_slot(slot, header.payload_bytes)[:] = payload
            file.seal_slot(header)
        windows.commit(file)
        return file

    def held(self, rank: int) -> list[HeldWindow]:
        """On its node, as it says to others."""
        return held_windows(self.ranks[rank].store, identity_of(rank))

    def stop(self) -> None:
        for memory in self.ranks:
            memory.close(remove=False)


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Twins]:
    with tmpfs_directory() as shm:
        job = Twins(shm, monkeypatch)
        yield job
        job.stop()


def bits(file: WindowFile) -> list[tuple[bytes, bytes]]:
    """All records and the whole header of each slot."""
    return [
        (bytes(file.slot_blob(slot).frame), b''.join(_records(file, slot))) for slot in file.slots()
    ]


def _records(file: WindowFile, slot: int) -> list[bytes]:
    payload = file.payload(slot)
    records = file.header(slot).records
    return [payload[it.offset : it.offset + it.nbytes].tobytes() for it in records]


def send(twins: Twins, file: WindowFile, owner: int = 0) -> None:
    (client,) = twins.ranks[owner].peers().values()
    put_window(client, file, owner=owner)


def test_twins_keep_only_stubs_of_each_other(twins: Twins) -> None:
    for memory in twins.ranks:
        assert memory.copies.twins == [(1,), (0,)] and memory.copies.holders == [(), ()]
        assert memory.plan.by_kind()['replicas'] == GENERATIONS * in_pages(STUB)
        stubs = [path.stat().st_size for path in memory.store.path.rglob('stub-*/*.window')]
        assert stubs == [STUB] * GENERATIONS
        assert 'replicas: 1, 1 of this node captured by data-parallel peers' in memory.describe()
        assert f'spares {SLOT} bytes an iteration' in memory.describe()


def test_lost_window_is_restored_from_the_twin_with_every_bit(twins: Twins) -> None:
    file = twins.capture(0)
    captured = bits(file)
    assert captured != bits(twins.capture(1))
    sent: list[int] = []
    client = twins.ranks[0].peers()[1]
    for slot in file.slots():
        blob = client._blob(file, slot)
        sent.append(len(blob.payload) + len(blob.frame))
        client.put_slot(0, file, slot, Agreed(None))
    assert client.commit(0, file.required_name())
    assert sum(sent) < WINDOW * 2**10 < file.used_bytes()
    memory = twins.lose_node(0)
    inventories = [twins.held(rank) for rank in range(2)]
    assert inventories == [[], [HeldWindow(CANDIDATE, owner) for owner in range(2)]]
    file, source = verified_window(memory, CANDIDATE, inventories, identity_of(0))
    assert source == 'rank 1'
    assert bits(file) == captured


@pytest.mark.parametrize('differs', ['weight0', 'weight2'])
def test_a_twin_that_holds_other_bytes_is_no_copy(twins: Twins, differs: str) -> None:
    file = twins.capture(0)
    twins.capture(1, differs=differs)
    with pytest.raises(OtherBytes, match=rf'ranks 0 and 1 do not hold the same .*\.{differs}'):
        send(twins, file)
    assert twins.held(1) == [HeldWindow(CANDIDATE, 1)]
    assert twins.ranks[1].store.scan_stubs() == []


def test_a_stub_waits_until_the_twin_has_captured_the_same(twins: Twins) -> None:
    file, client = twins.capture(0), twins.ranks[0].peers()[1]
    put_slots(client, file)
    assert not client.commit(0, named(0))
    assert twins.held(1) == []
    twins.capture(1)
    assert client.commit(0, named(0))
    assert HeldWindow(CANDIDATE, 0) in twins.held(1)


def test_a_stub_counts_only_as_long_as_its_base_is_there(twins: Twins) -> None:
    file = twins.capture(0)
    twins.capture(1)
    send(twins, file)
    client = twins.ranks[0].peers()[1]
    twins.ranks[1].windows.discard(named(0))
    assert not client.commit(0, named(0))
    twins.capture(1, differs='weight0')
    with pytest.raises(PeerRefused, match='do not hold the same'):
        client.commit(0, named(0))
    with pytest.raises(OtherBytes):
        put_window(client, file)
    assert twins.held(1) == [HeldWindow(CANDIDATE, 1)]
    twins.ranks[1].windows.discard(named(0))
    twins.capture(1)
    put_window(client, file)
    assert HeldWindow(CANDIDATE, 0) in twins.held(1)


def test_a_base_that_is_reused_while_it_is_compared_is_awaited(
    twins: Twins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would differ for ever: the window would count with a copy fewer."""
    file, base = twins.capture(0), twins.capture(1, differs='weight0')
    windows = twins.ranks[1].windows

    really = windows.file

    def reused(name: WindowName, wait_s: float = 0.0) -> WindowFile | None:
        if not wait_s:
            return really(name)
        windows.discard(name)
        return base

    client = twins.ranks[0].peers()[1]
    put_slots(client, file)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(windows, 'file', reused)
        assert not client.commit(0, named(0))
    twins.capture(1)
    assert client.commit(0, named(0))
    assert HeldWindow(CANDIDATE, 0) in twins.held(1)


@pytest.mark.parametrize('damaged', ['base', 'stub'])
def test_damage_of_either_part_is_found(twins: Twins, damaged: str) -> None:
    file = twins.capture(0)
    base = twins.capture(1)
    send(twins, file)
    (stub,) = twins.ranks[1].store.scan_stubs()
    file = base if damaged == 'base' else WindowFile.open(stub.path, writable=True)
    file.payload(1)[8] ^= 1
    twins.lose_node(0)
    with pytest.raises(PeerRefused, match='checksum mismatch'):
        twins.ranks[0].fetch(CANDIDATE, 1, lambda file, header: None)


def test_a_new_process_of_the_twin_finds_its_stubs(twins: Twins) -> None:
    file = twins.capture(0)
    captured = bits(file)
    twins.capture(1)
    send(twins, file)
    twins.ranks[1].close(remove=False)
    twins.begin_again(1)
    twins.lose_node(0)
    assert bits(twins.ranks[0].fetch(CANDIDATE, 1, lambda file, header: None)) == captured


def test_verification_uses_the_headers_of_the_owner(twins: Twins) -> None:
    file = twins.capture(0, start=3)
    headers = file.headers()
    client = twins.ranks[0].peers()[1]
    client.put_slot(0, file, 0, Agreed(None))
    twins.lose_node(0)
    assert twins.ranks[0].captured_after(0) == headers[:1]


# In the background


class Followed:
    """What the replicator of rank 0 says."""

    def __init__(self, twins: Twins) -> None:
        self.replicated: list[WindowName] = []
        self.degraded: list[str] = []
        self.replicator = Replicator(
            0, twins.ranks[0].peers(), self.replicated.append, self.degraded.append
        )

    def submit(self, file: WindowFile) -> None:
        for slot in file.slots():
            self.replicator.submit(file, slot)


@pytest.fixture
def followed(twins: Twins) -> Iterator[Followed]:
    followed = Followed(twins)
    yield followed
    followed.replicator.stop()


def test_window_counts_once_the_twin_has_captured_it(twins: Twins, followed: Followed) -> None:
    followed.submit(twins.capture(0))
    wait_for(lambda: twins.ranks[1].server._inboxes[0]._receiving is not None)
    assert followed.replicated == []
    twins.capture(1)
    wait_for(lambda: followed.replicated)
    assert (followed.replicated, followed.degraded) == ([named(0)], [])
    assert followed.replicator.bytes_per_s() is None, 'stubs say nothing of the link'


def test_a_window_of_which_the_twin_has_other_bytes_counts_with_a_copy_fewer(
    twins: Twins, followed: Followed
) -> None:
    twins.capture(1, differs='weight0')
    followed.submit(twins.capture(0))
    wait_for(lambda: followed.replicated)
    assert 'has a copy fewer: ranks 0 and 1 do not hold the same' in followed.degraded[0]
    assert HeldWindow(CANDIDATE, 0) not in twins.held(1)


def test_a_twin_that_joined_later_holds_up_no_newer_window(
    twins: Twins, followed: Followed
) -> None:
    followed.submit(twins.capture(0))
    followed.replicator.agree(Agreed(named(0)))
    twins.ranks[0].windows.persisted(named(0))
    twins.capture(1, start=WINDOW)
    followed.submit(twins.capture(0, start=WINDOW))
    wait_for(lambda: followed.replicated)
    assert (followed.replicated, followed.degraded) == ([named(WINDOW)], [])
