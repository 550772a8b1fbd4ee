# SPDX-License-Identifier: Apache-2.0
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.errors import HostMemoryError
from moevement_ext.memory.budget import NOTHING_LOGGED, Logged
from moevement_ext.memory.mapped_file import in_pages
from moevement_ext.memory.upstream_log.record import Direction, LogKey
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.name import HeldWindow, RankIdentity, Window
from moevement_ext.recover.inventory import held_windows
from moevement_ext.replicate import host_memory
from moevement_ext.replicate.client import PeerLost, ReplicaClient
from moevement_ext.replicate.host_memory import HostMemory
from moevement_ext.replicate.node_plan import Member, Share
from moevement_ext.replicate.secret import of_attempt
from tests.unit.memory.samples import (
    RUN,
    SECRET,
    TOPOLOGY,
    WINDOW,
    begun,
    capacity,
    commit,
    digest,
    identity_of,
    named,
    write_window,
)
from tests.unit.memory.test_device import Runtime, use
from tests.unit.replicate.peers import CPU, host_memory_of, member_of, put_window

NODES = ('node-a', 'node-b')
CANDIDATE = Window(named(0), WINDOW)
LOGGED = Logged(2**15, 2**14)
LOG_BYTES = 2**16 + 2**14


def settings(shm: Path, **others: Any) -> SparseCheckpointConfig:
    """With a window of 1 and the usual lag the log has room for two iterations."""
    return SparseCheckpointConfig(dir=str(shm), window=1, **others)


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('MOEVEMENT_NODE', NODES[0])


class Job:
    """Ranks on emulated nodes that hold replicas for each other; only rank 0 keeps a log."""

    def __init__(
        self,
        shm: Path,
        monkeypatch: pytest.MonkeyPatch,
        nodes: tuple[str, ...] = NODES,
        **others: Any,
    ) -> None:
        config = settings(shm, replicas=len(nodes) - 1, max_wait=0, **others)
        logged = [LOGGED, *[NOTHING_LOGGED] * (len(nodes) - 1)]
        members = [member_of(node, logged=log) for node, log in zip(nodes, logged, strict=True)]
        self.degraded: list[str] = []
        self.ranks: list[HostMemory] = []
        for rank, node in enumerate(nodes):
            monkeypatch.setenv('MOEVEMENT_NODE', node)
            share = Share(identity_of(rank), capacity(), logged[rank])
            memory = host_memory_of(config, members, share, on_degraded=self.degraded.append)
            self.ranks.append(memory)
        addresses: list[bytes] = []
        for memory in self.ranks:
            memory.connect(lambda own: [addresses.append(own) or own] * len(nodes))
        for memory in self.ranks:
            memory.connect(lambda own: addresses)

    def commit(self, rank: int, start: int = 0) -> WindowFile:
        file = begun(self.ranks[rank].windows, start)
        write_window(file, rank)
        self.ranks[rank].windows.commit(file)
        return file

    def inventories(self) -> list[list[HeldWindow]]:
        return [held_windows(memory.store, RankIdentity(RUN, TOPOLOGY, 0)) for memory in self.ranks]

    def begin_again(self, shm: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> HostMemory:
        """Rank 0, whose memory is lost, with window files of another size."""
        before = self.ranks[0]
        before.close(remove=True)
        monkeypatch.setenv('MOEVEMENT_NODE', NODES[0])
        members = [msgspec.structs.replace(member, salt=SECRET) for member in before.members]
        share = Share(identity_of(0), nbytes, disk=before.disk)
        memory = host_memory_of(settings(shm, replicas=1), members, share)
        memory.addresses = before.addresses
        self.ranks[0] = memory
        return memory

    def stop(self) -> None:
        for memory in self.ranks:
            memory.close(remove=False)


@pytest.fixture
def job(shm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    job = Job(shm, monkeypatch)
    yield job
    job.stop()


def test_lost_window_is_fetched_from_its_holder(job: Job) -> None:
    file = job.commit(0)
    expected = digest(file.path)
    put_window(job.ranks[0].peers()[1], file)
    assert job.ranks[1].receive_cost.s_per_byte() > 0
    job.ranks[0].windows.discard(named(0))
    arrived: list[int] = []
    fetched = job.ranks[0].fetch(CANDIDATE, 1, lambda file, header: arrived.append(header.slot))
    assert arrived == list(range(WINDOW))
    assert digest(fetched.path) == expected
    assert job.ranks[0].windows.file(named(0)) is fetched


def test_longer_window_of_an_earlier_start_is_fetched(
    job: Job, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_window(job.ranks[0].peers()[1], job.commit(0))
    memory = job.begin_again(shm, monkeypatch, capacity(window=1))
    fetched = memory.fetch(CANDIDATE, 1, lambda file, header: None)
    assert (
        fetched.slots() == list(range(WINDOW)) and fetched.capacity > memory.windows.capacity_bytes
    )
    assert memory.windows.file(named(0)) is fetched
    for start in (3, 4, 5):
        file = begun(memory.windows, start)
        write_window(file, window=1)
        memory.windows.commit(file)
        memory.windows.persisted(named(start))
    assert {file.capacity for file in memory.windows.files()} == {capacity(window=1)}


def test_window_still_in_transfer_is_requested_later(job: Job) -> None:
    under_way = begun(job.ranks[0].windows, 0)
    with pytest.raises(PeerLost, match='window 0 is still received'):
        job.ranks[0].fetch(CANDIDATE, 1, lambda file, header: None)
    job.ranks[0].windows.abandon(under_way)
    assert job.commit(0).name == named(0)


def test_inventory_omits_foreign_and_damaged_windows(job: Job) -> None:
    job.commit(0)
    damaged = job.commit(0, start=3)
    damaged.array[:8] = 0
    store = job.ranks[0].store
    assert held_windows(store, RankIdentity(RUN, TOPOLOGY, 1)) == [HeldWindow(CANDIDATE, 0)]
    assert held_windows(store, RankIdentity('other-run', TOPOLOGY, 1)) == []
    assert held_windows(store, RankIdentity(RUN, 'other-topology', 1)) == []


def test_over_budget_is_refused_before_anything_is_reserved(shm: Path) -> None:
    config = settings(shm, host_memory_gb=0.0001)
    with pytest.raises(HostMemoryError, match='--sparse-ckpt-host-memory-gb'):
        share = Share(identity_of(0), capacity(), LOGGED)
        host_memory_of(config, [member_of('node-a', logged=LOGGED)], share)
    assert not [*shm.rglob('*.window')] and not [*shm.rglob('upstream-log')]


# A process in the place of a lost one


def test_a_replacement_on_another_node_leaves_replicas_where_they_are(
    job: Job, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = job.ranks
    monkeypatch.setenv('MOEVEMENT_NODE', 'node-c')
    share = Share(identity_of(0), capacity(), LOGGED)
    memory = host_memory_of(settings(shm, replicas=1), first.members, share)
    try:
        assert memory.copies == first.copies
        assert [*memory.plan.ranks] == [0] and memory.members[0].node == 'node-c'
        memory.connect(lambda own: [msgspec.msgpack.encode(it) for it in second.addresses])
        assert memory.addresses[1] == second.addresses[1]
        assert memory.addresses[0] != second.addresses[0], 'that one is dead'
        assert memory.addresses[0][1] == memory.server.address[1]
    finally:
        memory.close(remove=True)


# Upstream log


def test_the_log_of_a_rank_is_in_the_budget_and_served_to_others(job: Job) -> None:
    first, second = job.ranks
    assert [memory.plan.by_kind()['log_ring'] for memory in job.ranks] == [LOG_BYTES, 0]
    assert first.log is not None
    assert first.log.array.size == LOG_BYTES
    sent = torch.arange(12.0)
    first.log.append(1, Direction.DOWN, sent)
    found = second.client(0).fetch_log(LogKey(1, Direction.DOWN, 0))
    assert found is not None
    assert torch.equal(torch.frombuffer(found[1], dtype=torch.float32), sent)


# Members of the job, and failures at the start


def test_each_attempt_derives_its_secret_from_rank_0s_salt(shm: Path) -> None:
    drawn: list[list[Member]] = []

    def exchange(own: bytes) -> list[bytes]:
        other = msgspec.structs.replace(
            msgspec.msgpack.decode(own, type=Member), node='node-b', salt=bytes(32)
        )
        everyone = [own, msgspec.msgpack.encode(other)]
        drawn.append([msgspec.msgpack.decode(item, type=Member) for item in everyone])
        return everyone

    config = SparseCheckpointConfig(dir=str(shm), replicas=1)
    for attempt in range(2):
        memory = HostMemory(
            config, 'run1', Share(identity_of(0), capacity()), CPU, pytest.fail, exchange, SECRET
        )
        salt = drawn[attempt][0].salt
        client = ReplicaClient(memory.server.address, of_attempt(SECRET, salt), 20.0)
        assert client.fetch_headers(1, 0) == []
        client.close()
        for stranger in (SECRET, salt, of_attempt(bytes(32), salt)):
            with pytest.raises(PeerLost, match='does not know the secret'):
                ReplicaClient(memory.server.address, stranger, 20.0).fetch_headers(1, 0)
        memory.close(remove=True)
    salts = {members[0].salt for members in drawn}
    assert len(salts) == 2 and {len(salt) for salt in salts} == {32}


def test_unusable_memory_costs_protection_and_not_training(shm: Path) -> None:
    """Whatever is wrong, it is a HostMemoryError, and what is not ours stays as it is."""
    (shm / 'file').write_text('not a directory')
    shared = shm / 'shared'
    shared.mkdir()
    shared.chmod(0o777)
    wrong = {
        str(directory): SparseCheckpointConfig(dir=str(directory))
        for directory in (shm / 'file', shm / 'file' / 'below', shared, Path('/proc/nowhere'))
    }
    nosuch = SparseCheckpointConfig(dir=str(shm / 'memory'), interface='nosuch0')
    wrong['interface=nosuch0'] = nosuch
    for what, config in wrong.items():
        with pytest.raises(HostMemoryError, match=what):
            host_memory_of(config, [member_of('node-a')])
    assert [path for path in (shm / 'memory').rglob('*') if path.is_file()] == []
    assert (shm / 'file').read_text() == 'not a directory'
    assert [*shared.iterdir()] == []


def test_files_have_pages_for_the_window_in_force_and_grow_within_the_plan(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SparseCheckpointConfig(dir=str(shm), replicas=1, max_window=3)
    shorter = [(capacity(window), 0) for window in (1, 2, 3)]
    share = Share(identity_of(0), capacity(), longest_window=3, window=1, shorter=shorter)
    members = [member_of(node, shorter=shorter) for node in ('node-a', 'node-b')]
    memory = host_memory_of(config, members, share)
    try:
        files = [*shm.rglob('*.window')]
        most = memory.plan.by_kind()
        for window in (1, 3, 2, 1):
            memory.make_room_for(window)
            size = in_pages(capacity(window))
            assert [path.stat().st_blocks * 512 for path in files] == [size] * 4
            kinds = memory.by_kind()
            assert (kinds['own_windows'], kinds['replicas']) == (2 * size, 2 * size)
            if window == 3:
                assert kinds == most
        replicas = memory.server._inboxes[1].windows
        monkeypatch.setattr(replicas, 'make_room', full_but_for(replicas.make_room))
        with pytest.raises(HostMemoryError, match='full'):
            memory.make_room_for(2)
        assert [path.stat().st_blocks * 512 for path in files] == [in_pages(capacity(1))] * 4
        assert memory.window == 1
    finally:
        memory.close(remove=True)


def test_the_log_is_for_the_window_in_force_and_follows_it(shm: Path) -> None:
    config = SparseCheckpointConfig(dir=str(shm), replicas=0, max_window=4)
    share = Share(identity_of(0), capacity(), LOGGED, longest_window=3, window=1)
    memory = host_memory_of(config, [member_of('node-a', logged=LOGGED)], share)
    try:
        assert memory.log is not None
        iteration = LOGGED.iteration_bytes
        longest = memory.plan.by_kind()['log_ring']
        sizes = [memory.log.array.size]
        for window in (2, 1, 3, 4):
            memory.make_room_in_log(window)
            sizes.append(memory.log.array.size)
        steps = [0, 2 * iteration, 2 * iteration, 4 * iteration, 4 * iteration]
        assert sizes == [LOG_BYTES + step for step in steps] and sizes[-1] == longest
        assert 'windows: up to 3 iterations, as 4 do not fit' in memory.describe()
        memory.give_back_log(1)
        memory.log.append(1, Direction.DOWN, torch.zeros(8))
        memory.log.drain()
        assert memory.log.array.size == LOG_BYTES
        assert memory.by_kind()['log_ring'] == in_pages(LOG_BYTES)
    finally:
        memory.close(remove=True)


def full_but_for(make_room: Callable[[int], None]) -> Callable[[int], None]:
    """Without room for more than windows of one slot."""

    def limited(nbytes: int) -> None:
        if nbytes > capacity(1):
            raise HostMemoryError('full')
        make_room(nbytes)

    return limited


GPU = torch.device('cuda', 3)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once all is reserved that this rank holds for others."""
    done = threading.Event()
    reserve = HostMemory._reserve_replicas

    def reserving(*args: Any) -> Any:
        found = reserve(*args)
        done.set()
        return found

    monkeypatch.setattr(HostMemory, '_reserve_replicas', reserving)
    return done


def reserve(shm: Path, device: torch.device, logged: Logged = NOTHING_LOGGED) -> HostMemory:
    members = [member_of(node, logged=logged) for node in ('node-a', 'node-b')]
    config = SparseCheckpointConfig(dir=str(shm), replicas=1, window=1)
    share = Share(identity_of(0), capacity(), logged)
    return host_memory_of(config, members, share, device)


def test_memory_that_cannot_be_pinned_fails_the_set_up_and_is_freed(
    shm: Path, served: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(Runtime(2, served), monkeypatch)
    with pytest.raises(HostMemoryError, match='CUDA cannot pin'):
        reserve(shm, GPU)
    assert not [path for path in shm.rglob('*') if path.is_file()]


def test_windows_outlive_a_start_whose_memory_cannot_be_pinned(
    shm: Path, served: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = reserve(shm, CPU)
    path = commit(before.windows, 0).path
    before.close(remove=False)
    use(Runtime(2, served), monkeypatch)
    with pytest.raises(HostMemoryError, match='CUDA cannot pin'):
        reserve(shm, GPU)
    assert path.exists(), 'the next start needs it'


def test_without_room_for_the_log_nothing_is_kept(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise HostMemoryError('no room for the log')

    monkeypatch.setattr(host_memory, 'UpstreamLog', full)
    with pytest.raises(HostMemoryError, match='no room for the log'):
        reserve(shm, CPU, Logged(2**12, 2**12))
    assert not [path for path in shm.rglob('*') if path.is_file()]
