# SPDX-License-Identifier: Apache-2.0
"""All host memory of one rank, and its connections to peers.

Set up once before iteration 1, collectively: sizes are exchanged, the budget is checked, files are
reserved, replica holders are placed and servers started. Later as much stays reserved as the
windows in force need.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
import torch

from moevement_ext.config import SparseCheckpointConfig, node_name
from moevement_ext.errors import HostMemoryError
from moevement_ext.logger import logger_of
from moevement_ext.memory.budget import LEDGER_RECORDS, RankMemory, rank_memory
from moevement_ext.memory.device import pin, threads_beside
from moevement_ext.memory.file_system import gib
from moevement_ext.memory.ledger import Ledger, LedgerEntry
from moevement_ext.memory.limits import cores_left
from moevement_ext.memory.mapped_file import in_pages
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.window.file import FileTooSmall, WindowFile
from moevement_ext.memory.window.generations import FileSize, OwnerWindows
from moevement_ext.memory.window.name import Window
from moevement_ext.memory.window.refusal import RefusedWindow, UnreadableWindow
from moevement_ext.memory.window.slot import SlotHeader
from moevement_ext.plan.strategy.choice import disk_only
from moevement_ext.rates import CpuCost
from moevement_ext.replicate import node_plan
from moevement_ext.replicate.client import PeerLost, PeerRefused, ReplicaClient, TwinClient
from moevement_ext.replicate.inbox import Inbox
from moevement_ext.replicate.own_address import local_host
from moevement_ext.replicate.replica_server import ReplicaServer
from moevement_ext.replicate.secret import (
    CoordinatorSecrets,
    closed_between_nodes,
    mark,
    of_attempt,
    of_coordinator,
)

logger = logger_of(__name__)

Exchange = Callable[[bytes], list[bytes]]
"""Collective all-gather of bytes, by rank."""

_LEDGER_TIMEOUT_S = 5.0  # for up to a MiB, which the other rank has at hand
_ADDRESS = msgspec.msgpack.Decoder(tuple[str, int])
_MEMBER = msgspec.msgpack.Decoder(node_plan.Member)


class HostMemory:
    """Window files, replicas held for others, ledger and server of one rank.

    Construction and `connect` are collective. Any thread may call `fetch` and
    `interrupt_fetch`; the training thread calls the other methods.

    Args:
        share: contents and sizes of this rank's memory.
        device: device of the state and of the logged tensors.
        on_degraded: called with a reason when the log cannot keep all records.

    Attributes:
        members: descriptions of all ranks, by rank.
        copies: placement of the copies of all ranks' windows.
        plan: bytes of all ranks of this node.
        disk_only: no recovery starts from windows in memory.
        server: serves windows and log to the peers.
        receive_cost: CPU time of receiving replicas.
        window: largest W for which the window files have room.
        cores: CPU cores of this rank, assuming equal shares for the ranks of a host.
        mark: mark of the job's secret.
        forget_other_layouts: called on all ranks once windows of other layouts are useless.

    Raises `HostMemoryError` if the plan does not fit, the tmpfs is foreign or not writable, CUDA
    cannot pin the memory, or other hosts cannot reach this one; `StoreInUseError` if another live
    job has the run id; `ConfigurationError` if the topology file is wrong.
    """

    def __init__(
        self,
        config: SparseCheckpointConfig,
        run_id: str,
        share: node_plan.Share,
        device: torch.device,
        on_degraded: Callable[[str], None],
        exchange: Exchange,
        secret: bytes,
    ) -> None:
        self.rank = share.identity.rank
        self._config = config
        self._share = share
        self._to_disk = config.disk is not None
        self._longest_window = share.longest_window or config.longest_window
        self.disk = share.disk
        self.disk_only = disk_only(config)
        self.store = NodeStore(Path(config.dir), run_id, node_name())
        own = node_plan.described(share, config.topology, self.store.path)
        self.members = [_MEMBER.decode(item) for item in exchange(msgspec.msgpack.encode(own))]
        # A process that replaces this one later receives the same salt from the other ranks.
        self._secret = of_attempt(secret, self.members[0].salt)
        self.mark = mark(secret)
        given = None if closed_between_nodes() else secret
        self.coordinator_secrets = CoordinatorSecrets(
            of_coordinator(given), of_coordinator(given, self.members[0].salt)
        )
        self.copies = node_plan.copies_of(self.members, config.topology, config.replicas)
        if self.rank == 0:
            node_plan.warn_of_same_names(self.members)
        # A replacement may run on another node; the placement of replicas does not change.
        self.members[self.rank] = own
        self.forget_other_layouts: Callable[[], None] = lambda: None
        self._fetching: ReplicaClient | None = None
        self.receive_cost = CpuCost()
        holds_none = None if share.hosts_replicas else self.rank
        self._job = node_plan.JobMemory(
            self.members,
            self.copies,
            self._longest_window,
            config.log_lag,
            self._to_disk,
            holds_none,
        )
        self.plan = self._job.of_node(node_name(), self._longest_window)
        self.window = share.window or self._longest_window
        self._changing = threading.Lock()
        self.addresses: list[tuple[str, int]] = []
        with ExitStack() as failed, _named_by(self.store.path):
            failed.callback(self._leave)
            self.plan.check(config.host_memory_gb, self.store.path)
            of_all = self._job.of_node(node_name(), self._longest_window, shared=True)
            of_all.check(None, self.store.path)
            size = FileSize(own.capacity_bytes, self._own_file_bytes(self.window))
            self.windows = OwnerWindows(
                self.store, self.rank, self.rank, size, holdable=self._to_disk
            )
            pinned = self.windows.files() if device.type == 'cuda' else []
            with threads_beside(device) as beside:  # pinning takes seconds for some GB
                begun = [beside.submit(pin, file, file.room) for file in pinned]
                opened = beside.submit(self._open_log, device, on_degraded)
                failed.callback(_close_log, opened)
                path = self.store.ledger_path(self.rank)
                self.ledger = Ledger(path, LEDGER_RECORDS, share.identity)
                failed.callback(self.ledger.close)
                self._inboxes = self._reserve_replicas()
            self.log = opened.result()
            for done in begun:
                done.result()
            hosts = Counter(member.host for member in self.members)
            self.cores = cores_left() / hosts[own.host]
            host = local_host(config.interface, several_hosts=len(hosts) > 1)
            self.server = ReplicaServer(
                self.store, self.rank, self._inboxes, self._secret, host, ledger=self.ledger
            )
            failed.callback(self.server.stop)
            self.server.serve_log(self.log)
            self._reserved = self._make_room_for(self.window)
            self._parts = failed.pop_all()

    def _open_log(
        self, device: torch.device, on_degraded: Callable[[str], None]
    ) -> UpstreamLog | None:
        nbytes = self._job.log_bytes(self.rank, self.window)
        path = self.store.holder_path(self.rank) / 'upstream-log'
        wait_s = self._config.max_wait
        return UpstreamLog(path, nbytes, device, wait_s, on_degraded) if nbytes else None

    def _own_file_bytes(self, window: int) -> int:
        return self._job.sized(self.rank, window).capacity_bytes

    def _reserve_replicas(self) -> dict[int, Inbox]:
        sizes, inboxes = self._job.held_by(self.rank, self.window), {}
        for owner, longest in self._job.held_by(self.rank, self._longest_window).items():
            of_twin = self.rank in self.copies.twins[owner]
            size = FileSize(longest, sizes[owner])
            windows = OwnerWindows(self.store, self.rank, owner, size, stubs=of_twin)
            inboxes[owner] = Inbox(windows, self.receive_cost, self.windows if of_twin else None)
        return inboxes

    def make_room_in_log(self, window: int) -> None:
        """Enlarge the log for windows of this length, within the memory plan. Any thread.

        Raises `HostMemoryError` or `OSError` if other files have taken the space.
        """
        if self.log is not None:
            self.log.grow(self._job.log_bytes(self.rank, window))

    def give_back_log(self, window: int) -> None:
        """Free log memory that only longer windows need. Any thread."""
        if self.log is not None:
            self.log.shrink(self._job.log_bytes(self.rank, window))

    def make_room_for(self, window: int) -> None:
        """Reserve room for windows of this length: own ones and replicas, within the memory plan.

        Memory that only longer windows took is freed when no longer needed, but not in this call if
        another thread is making room. Any thread but the training thread. Raises `HostMemoryError`
        or `OSError` if other files have taken the space; nothing has changed then.
        """
        if not self._changing.acquire(blocking=window > self.window):
            return
        try:
            self._reserved = self._make_room_for(window)
            self.window = window
        except BaseException:
            self._make_room_for(self.window)
            raise
        finally:
            self._changing.release()

    def _make_room_for(self, window: int) -> RankMemory:
        replicas = self._job.held_by(self.rank, window)
        own = self._own_file_bytes(window)
        self.windows.make_room(own)
        for owner, nbytes in replicas.items():
            self._inboxes[owner].windows.make_room(nbytes)
        return rank_memory(own, replicas.values(), 0, self._to_disk)

    def describe(self) -> str:
        twins = {rank: len(self.copies.twins[rank]) for rank in self.plan.ranks}
        replicas = f'replicas: {self.copies.least()}'
        if any(twins.values()):
            spared = sum(count * self.members[rank].slot_bytes for rank, count in twins.items())
            replicas += (
                f', {sum(twins.values())} of this node captured by data-parallel peers anyway, '
                f'which spares {gib(spared)} an iteration'
            )
        longest, most = self._longest_window, self._config.longest_window
        windows = f'windows: up to {longest} iterations'
        windows += '' if longest == most else f', as {most} do not fit'
        return (
            f'node: {self.members[self.rank].node} | {self.plan.describe()} | '
            f'directory: {self.store.path} | {replicas} | {windows}'
        )

    def first_on_node(self) -> bool:
        """True on exactly one rank of each node."""
        return self.rank == min(self.plan.ranks)

    def by_kind(self) -> dict[str, int]:
        """Bytes of host memory that this rank has reserved, by kind."""
        log = 0 if self.log is None else in_pages(self.log.array.size)
        return msgspec.structs.asdict(msgspec.structs.replace(self._reserved, log_ring=log))

    def connect(self, exchange: Exchange) -> None:
        """Exchange the addresses of all ranks' servers. Collective."""
        address = msgspec.msgpack.encode(self.server.address)
        self.addresses = [_ADDRESS.decode(item) for item in exchange(address)]
        self.addresses[self.rank] = self.server.address

    def client(self, rank: int) -> ReplicaClient:
        """Create a client of another rank's server, not yet connected."""
        log_bytes = self._job.log_bytes(rank, self._longest_window)
        return ReplicaClient(self.addresses[rank], self._secret, max_record_bytes=log_bytes)

    def peer_addresses(self) -> list[tuple[str, int]]:
        """Current host and port of each twin and each holder of this rank's replicas."""
        return [self.addresses[rank] for rank in self.copies.reached(self.rank)]

    def peers(self) -> dict[int, ReplicaClient]:
        """Create clients of this rank's twins and replica holders, by rank."""
        twins = {
            rank: TwinClient(self.addresses[rank], self._secret, self._share.own_parts)
            for rank in self.copies.twins[self.rank]
        }
        return twins | {rank: self.client(rank) for rank in self.copies.holders[self.rank]}

    def fetch(
        self, window: Window, holder: int, received: Callable[[WindowFile, SlotHeader], None]
    ) -> WindowFile:
        """Fetch this rank's part of a window from a rank whose node has it, and commit it here.

        Any single thread. `received` and errors as of `ReplicaClient.fetch_window`.
        """
        with self._reaching(self.client(holder)) as client:
            client.open()
            return self.receive(
                window, lambda file: client.fetch_window(self.rank, window.name, file, received)
            )

    def fetch_ledger(self, address: tuple[str, int], after: int, to: int) -> list[LedgerEntry]:
        """`ReplicaClient.fetch_ledger` of the rank at this address. Any single thread."""
        with self._reaching(ReplicaClient(address, self._secret, _LEDGER_TIMEOUT_S)) as client:
            return client.fetch_ledger(after, to)

    @contextmanager
    def _reaching(self, client: ReplicaClient) -> Iterator[ReplicaClient]:
        """Within the context `interrupt_fetch` interrupts this client, which is then closed."""
        self._fetching = client
        try:
            yield client
        finally:
            if self._fetching is client:  # otherwise a later fetch has replaced this one
                self._fetching = None
            client.close()

    def fetch_from_disk(
        self, window: Window, received: Callable[[WindowFile, SlotHeader], None]
    ) -> WindowFile:
        """Fetch, like `fetch`, from the disk of this rank, which must have one."""
        disk = self.disk
        assert disk is not None
        return self.receive(window, lambda file: disk.read(window.name, file, received))

    def receive(self, window: Window, deliver: Callable[[WindowFile], object]) -> WindowFile:
        """Receive and commit a window from another place. Errors as in `fetch`.

        Under earlier flags the window may have been larger than the files of this start.
        """
        try:
            return self._fill(self._free_file(window), deliver)
        except FileTooSmall as small:
            if small.needed > window.length * self.windows.capacity_bytes:
                raise  # more than `length` files of this start can hold
            return self._fill(self.windows.begin_larger(window.name, small.needed), deliver)

    def _free_file(self, window: Window) -> WindowFile:
        try:
            room = self._own_file_bytes(window.length)
            file = self.windows.begin(window.name, room=room, fetched=True)
        except ValueError as error:  # an abandoned thread still waits for a peer
            raise PeerLost(f'window {window.start} is still received: {error}') from error
        if file is None:
            raise RefusedWindow(f'no free window file on rank {self.rank}')
        return file

    def _fill(self, file: WindowFile, deliver: Callable[[WindowFile], object]) -> WindowFile:
        try:
            deliver(file)
            self.windows.commit(file)
            return file
        except BaseException:
            self.windows.abandon(file)
            raise

    def captured_after(self, start: int) -> list[SlotHeader]:
        """Headers of this rank's captures in windows after `start`, by its memory or a holder's."""
        found = self.windows.headers_after(start)
        for holder, client in self.peers().items():
            if found:
                break
            try:
                found = client.fetch_headers(self.rank, start)
            except (PeerLost, PeerRefused, RefusedWindow) as error:
                logger.warning('nothing to compare with from rank %d: %s', holder, error)
            finally:
                client.close()
        return found

    def forget_former_places(self) -> None:
        """Free memory that earlier starts of the job kept here for ranks now on other nodes.

        Any thread, once all ranks and their holders have a window at their current places, or at
        the end. Takes as long as the system needs to free it.
        """
        twins = {owner for owner in self._inboxes if self.rank in self.copies.twins[owner]}
        hosted = self._inboxes.keys() - twins
        self.store.remove_owners_but({self.rank, *hosted}, self.rank, twins)
        if self.first_on_node():
            self.store.remove_holders_but(self.plan.ranks)
        self.forget_other_layouts()

    def interrupt_fetch(self) -> None:
        """Make a running fetch from a rank, on another thread, raise `PeerLost`. Any thread."""
        client = self._fetching
        if client is not None:
            client.interrupt()

    def give_up(self) -> None:
        """Free the reserved memory, but keep windows that a recovery may still need."""
        self._parts.close()

    def _leave(self) -> None:
        with suppress(UnreadableWindow):
            if not any(window.holder == self.rank for window in self.store.scan()):
                self.store.remove_rank(self.rank)
        self.store.close()

    def close(self, remove: bool) -> None:
        """Stop serving; with `remove` (a clean exit) delete this rank's files."""
        self.server.stop()
        if self.log is not None:
            self.log.close()
        self.ledger.close()
        if remove:
            self.forget_former_places()
            self.store.remove_rank(self.rank)
        else:
            self.store.close()


def _close_log(opened: Future[UpstreamLog | None]) -> None:
    log = None if opened.exception() is not None else opened.result()
    if log is not None:
        log.close()


@contextmanager
def _named_by(path: Path) -> Iterator[None]:
    """Raise an error of the system, which costs only protection, as a `HostMemoryError`."""
    try:
        yield
    except OSError as error:
        raise HostMemoryError(f'{path}: {error}') from error


class WindowRoom:
    """Room for windows of the current length (`in_force`), and of the next one.

    `limit` is the longest W with enough room, set once a longer one had too little.
    `on_degraded` is called with a reason when there is no room.
    """

    def __init__(self, memory: HostMemory, on_degraded: Callable[[str], None]) -> None:
        self._memory = memory
        self._on_degraded = on_degraded
        self._next = self.in_force = memory.window
        self.limit: int | None = None
        # Windows that start at or before this iteration may be longer, or still in use by a
        # recovery.
        self._unlike = -1
        self._log = threading.Lock()
        self._settling = threading.Lock()

    def begins(self, start: int, window: int) -> None:
        """Note that a window begins with the state after iteration `start`. Training thread."""
        if window != self.in_force:
            self._unlike = start - 1
        self.in_force = window

    def before(self, window: int) -> None:
        """Make room before windows of this length come into force. May take seconds.

        Any thread; the training thread only at the start, before the first iteration.

        Without room, such windows are given up until all ranks have a plan with shorter
        windows, for which every rank has room.
        """
        with self._settling:  # `settle` frees memory that only longer windows need
            self._next = window
        self.in_log(window)
        if window <= self._memory.window:
            return
        try:
            self._memory.make_room_for(window)
        except (HostMemoryError, OSError) as error:
            self.limit = self._memory.window
            self._on_degraded(f'there is no room for windows of {window}: {error}')

    def for_recovery(self, start: int, until: int) -> None:
        """Make room in the log for a recovery from window `start` to `until`. Training thread."""
        with self._log:
            self._unlike = max(self._unlike, start)
        self.in_log(until - start + 1)

    def in_log(self, window: int) -> None:
        """Enlarge the log; on failure localized recovery is impossible for a while. Any thread."""
        with self._log:
            try:
                self._memory.make_room_in_log(window)
            except (HostMemoryError, OSError) as error:
                self._on_degraded(f'the log has no room for windows of {window}: {error}')

    def settle(self, start: int) -> None:
        """Free memory that only longer windows needed. Tracker's thread.

        The log holds the iterations after the newly persisted window, which starts at
        `start`, so that window must be as short as the next ones.
        """
        with self._settling:
            window = max(self.in_force, self._next)
            if window < self._memory.window:
                self._memory.make_room_for(window)
        with self._log:
            if start > self._unlike:
                self._memory.give_back_log(max(self.in_force, self._next))
