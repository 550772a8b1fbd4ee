# SPDX-License-Identifier: Apache-2.0
"""Everything one rank keeps in host memory, and its connections to the ranks it shares with.

Set up once before iteration 1, collectively: sizes are exchanged, the budget is checked, files are
reserved, replica holders are placed and servers started.
"""

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from moevement_ext.config import SparseCheckpointConfig, node_name
from moevement_ext.errors import HostMemoryError
from moevement_ext.memory.budget import HostMemoryPlan, gib
from moevement_ext.memory.cgroup import cores_left
from moevement_ext.memory.disk import DiskWindows
from moevement_ext.memory.ledger import Ledger
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.pinning import pin
from moevement_ext.memory.sizing import (
    LEDGER_RECORDS,
    NOTHING_LOGGED,
    Logged,
)
from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.window.file import FileTooSmall, WindowFile
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import RankIdentity, Window, WindowName
from moevement_ext.memory.window.refused import RefusedWindow
from moevement_ext.memory.window.slot import SlotHeader
from moevement_ext.memory.window.twin import OwnParts
from moevement_ext.memory.witness import Witness
from moevement_ext.replicate.client import PeerLost, PeerRefused, ReplicaClient
from moevement_ext.replicate.domains import own_domain
from moevement_ext.replicate.greeting import new_secret
from moevement_ext.replicate.node_plan import (
    ALONE,
    Member,
    copies_of,
    hosted_by,
    log_bytes,
    node_plan,
    stubs_at,
)
from moevement_ext.replicate.own_address import host_identity, local_host
from moevement_ext.replicate.replica_server import Keeping, ReplicaServer, Stubs
from moevement_ext.replicate.secret import mark, of_life
from moevement_ext.replicate.twin_client import TwinClient

logger = logging.getLogger(__name__)

Exchange = Callable[[bytes], list[bytes]]
"""Collective: every rank gives some bytes and gets those of all ranks, by rank."""


class Share(NamedTuple):
    """What one rank is to keep in host memory."""

    identity: RankIdentity
    """Which rank it is, in which run."""
    capacity_bytes: int
    """Size of one window file of this rank."""
    logged: Logged = NOTHING_LOGGED
    """What it logs; its upstream log is sized for that."""
    hosts_replicas: bool = True
    """Hold those that are placed here; without them, their owners lack one."""
    disk: DiskWindows | None = None
    """Where its windows are on disk."""
    longest_window: int | None = None
    """W that all of that is for; None: as configured."""
    window: int | None = None
    """W to begin with, which the log has room for; None: the longest."""
    twin: 'TwinShare | None' = None
    """What its twins are to keep of its windows; None: it has none."""


class TwinShare(NamedTuple):
    """What there is to know of a rank for others that capture the same."""

    family: int
    """Lowest of those ranks."""
    stub_bytes: int
    """Size of a file for stubs of its windows."""
    slot_bytes: int
    """Mean size of a slot in the windows that the job begins with."""
    own_parts: OwnParts
    """What a twin need not have alike."""


class HostMemory:
    """Window files, replicas held for others, ledger and server of one rank.

    Construction and `connect` are collective. Any thread may call `fetch` and `interrupt_fetch`,
    the training thread the rest.

    Args:
        config: settings.
        run_id: directory name of the run.
        share: what this rank keeps.
        device: where the state lives, and the tensors of the log come from.
        on_degraded: called with a reason when the log cannot keep all it should.
        exchange: collective over all ranks.
        secret: of the job.

    Attributes:
        rank: global rank.
        store: directory of the run on this node.
        members: what all ranks have said of themselves, by rank.
        copies: where those of the windows of each rank are.
        plan: bytes of all ranks of this node.
        windows: the window files of this rank.
        ledger: its ledger.
        witness: what it had captured before a recovery that is not judged yet.
        log: its upstream log, None if it keeps none.
        disk: where its windows are on disk, None if nowhere.
        server: serves all of that to the peers.
        cores: that it has, if ranks of one host have equal parts of it.
        mark: of the secret of the job.

    Raises:
        HostMemoryError: over the budget, the tmpfs is too small, not ours or not writable, CUDA
            cannot pin so much, or no other host could reach this one.
        StoreInUseError: another live job has the same run id.
        ConfigurationError: the topology file is wrong.
    """

    def __init__(
        self,
        config: SparseCheckpointConfig,
        run_id: str,
        share: Share,
        device: torch.device,
        on_degraded: Callable[[str], None],
        exchange: Exchange,
        secret: bytes,
    ) -> None:
        self.rank = share.identity.rank
        self._identity = share.identity
        self._longest_window = share.longest_window or config.longest_window
        self._most_windows = config.longest_window
        self._log_lag = config.log_lag
        self._hosts_replicas = share.hosts_replicas
        self._to_disk = config.disk is not None
        self.disk = share.disk
        twin = share.twin or TwinShare(ALONE, 0, 0, frozenset())
        self._own_parts = twin.own_parts
        self.store = NodeStore(Path(config.dir), run_id, node_name())
        own = Member(
            node=node_name(),
            capacity_bytes=share.capacity_bytes,
            logged=share.logged,
            host=host_identity(),
            salt=new_secret(),
            domain=own_domain(node_name(), config.topology),
            family=twin.family,
            stub_bytes=twin.stub_bytes,
            slot_bytes=twin.slot_bytes,
        )
        self.members = _exchange_members(own, exchange)
        # One replaced later still has that of the others.
        self._secret = of_life(secret, self.members[0].salt)
        self.mark = mark(secret)
        self.copies = copies_of(self.members, config.topology, config.replicas)
        self.members[self.rank] = own  # a replacement may run on another node; replicas stay placed
        self.log: UpstreamLog | None = None
        self._fetching: ReplicaClient | None = None
        self.plan = self._plan()
        try:
            self.plan.check(config.host_memory_gb, self.store.path)
            self._reserve(own, device, config, on_degraded, share.window)
        except HostMemoryError:
            self.give_up()
            raise
        except OSError as error:  # costs protection as well, and not the training
            self.give_up()
            raise HostMemoryError(f'{self.store.path}: {error}') from error

    def _reserve(
        self,
        own: Member,
        device: torch.device,
        config: SparseCheckpointConfig,
        on_degraded: Callable[[str], None],
        window: int | None,
    ) -> None:
        rank = self.rank
        self.windows = OwnerWindows(
            self.store, rank, rank, own.capacity_bytes, holdable=self._to_disk
        )
        if device.type == 'cuda':
            for file in self.windows.files():
                pin(file)
        self.witness = Witness(self.store.holder_path(rank) / 'captured-before')
        self.ledger = Ledger(self.store.ledger_path(rank), LEDGER_RECORDS, self._identity)
        log_bytes = self._log_bytes(own, window)
        if log_bytes:
            path = self.store.holder_path(rank) / 'upstream-log'
            self.log = UpstreamLog(path, log_bytes, device, config.max_wait, on_degraded)
        hosts = Counter(member.host for member in self.members)
        self.cores = cores_left() / hosts[own.host]
        host = local_host(config.interface, several_hosts=len(hosts) > 1)
        keeping = Keeping(Stubs(self._stubs(rank), self.windows), config.verify_replicas)
        address = (host, 0)
        self.server = ReplicaServer(
            self.store, rank, self._hosted(rank), self._secret, address, keeping=keeping
        )
        if self.log is not None:
            self.server.serve_log(self.log)

    def make_room_in_log(self, window: int) -> None:
        """Have room in the log for windows of that length; the plan has it. Called by any thread.

        Raises:
            HostMemoryError, OSError: something else has taken it.
        """
        if self.log is not None:
            needed = self._log_bytes(self.members[self.rank], min(window, self._longest_window))
            self.log.grow(needed)

    def describe(self) -> str:
        """What this node keeps in host memory."""
        return (
            f'node: {self.members[self.rank].node} | {self.plan.describe()} | '
            f'directory: {self.store.path} | {self._replicas()} | {self._windows_that_fit()}'
        )

    def _replicas(self) -> str:
        said = f'replicas: {self.copies.least()}'
        twins = sum(len(self.copies.twins[rank]) for rank in self.plan.ranks)
        if not twins:
            return said
        spared = sum(
            len(self.copies.twins[rank]) * self.members[rank].slot_bytes for rank in self.plan.ranks
        )
        return (
            f'{said}, {twins} of this node captured by data-parallel peers anyway, '
            f'which spares {gib(spared)} an iteration'
        )

    def _windows_that_fit(self) -> str:
        longest, most = self._longest_window, self._most_windows
        said = f'windows: up to {longest} iterations'
        return said if longest == most else f'{said}, as {most} do not fit'

    def first_on_node(self) -> bool:
        """True on one rank of each node, the one that speaks for it."""
        return self.rank == min(self.plan.ranks)

    def by_kind(self) -> dict[str, int]:
        """Bytes of host memory of this rank, by kind."""
        return msgspec.structs.asdict(self.plan.ranks[self.rank])

    def connect(self, exchange: Exchange) -> None:
        """Tell the others where this rank's server listens. Collective."""
        address = msgspec.msgpack.encode(self.server.address)
        decoded = (msgspec.msgpack.decode(item, type=tuple[str, int]) for item in exchange(address))
        self.addresses = list(decoded)
        self.addresses[self.rank] = self.server.address

    def client(self, rank: int) -> ReplicaClient:
        """New client of another rank's server, not yet connected."""
        log_bytes = self._log_bytes(self.members[rank])
        return ReplicaClient(self.addresses[rank], self._secret, max_record_bytes=log_bytes)

    def peer_addresses(self) -> list[tuple[str, int]]:
        """Host and port where each twin, and each holder of this rank's replicas, listens now."""
        return [self.addresses[rank] for rank in self.copies.reached(self.rank)]

    def peers(self) -> dict[int, ReplicaClient]:
        """New clients of this rank's twins, and of the holders of its replicas, by rank."""
        twins = {
            rank: TwinClient(self.addresses[rank], self._secret, self._own_parts)
            for rank in self.copies.twins[self.rank]
        }
        return twins | {rank: self.client(rank) for rank in self.copies.holders[self.rank]}

    def fetch(
        self,
        window: Window,
        holder: int,
        received: Callable[[WindowFile, SlotHeader], None],
    ) -> WindowFile:
        """Fetch this rank's part of a window and commit it here. Called by any one thread.

        Args:
            window: the window.
            holder: rank whose node has it.
            received: called with every slot that has come and is undamaged, slot 0 first.

        Raises:
            RefusedWindow, PeerLost, PeerRefused, HostMemoryError: it could not be had there.
        """
        client = self._fetching = self.client(holder)
        try:
            client.open()
            return self._receive(
                window,
                lambda file: client.fetch_window(self.rank, window.name, file, received),
            )
        finally:
            if self._fetching is client:  # one that was left behind has a successor
                self._fetching = None
            client.close()

    def fetch_from_disk(
        self, window: Window, received: Callable[[WindowFile, SlotHeader], None]
    ) -> WindowFile:
        """The same from the disk of this rank, which must have one.

        Raises:
            RefusedWindow, PeerLost, HostMemoryError: it could not be had there.
        """
        disk = self.disk
        assert disk is not None
        return self._receive(window, lambda file: disk.read(window.name, file, received))

    def _receive(self, window: Window, deliver: Callable[[WindowFile], object]) -> WindowFile:
        """A window that comes from elsewhere, committed.

        Other flags may have made it longer than those of now, for which files are made.
        """
        try:
            return self._fill(self._free_file(window), deliver)
        except FileTooSmall as small:
            if small.needed > window.length * self.windows.capacity_bytes:
                raise  # more than so many windows of one slot
            return self._fill(self.windows.begin_larger(window.name, small.needed), deliver)

    def _free_file(self, window: Window) -> WindowFile:
        try:
            file = self.windows.begin(window.name)
        except ValueError as error:  # a thread that was left behind still waits for somebody
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
        """Headers of what was captured of this rank's state in windows that begin after `start`.

        From its own memory or, if nothing is there, from whoever holds its replicas.
        """
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

    def forget_window(self, name: WindowName) -> None:
        """Drop a window in this rank's memory, its own part and those it holds for others.

        All ranks do so, each its own: nobody need be asked who may have ended. What earlier lives
        of the job kept on this node for ranks that are elsewhere now goes, too.
        """
        self.windows.discard(name)
        self.server.discard(name)
        for stored in (*self.store.scan(), *self.store.scan_stubs()):
            if stored.name == name and stored.holder not in self.plan.ranks:
                stored.path.unlink(missing_ok=True)

    def forget_former_places(self) -> None:
        """Free what earlier lives of the job kept on this node for ranks that are elsewhere now.

        Called by any thread, once all ranks have a window where they and their holders are now, or
        at the end. Takes as long as the system takes to free memory.
        """
        hosted, stubs = self._hosted(self.rank), self._stubs(self.rank)
        self.store.remove_owners_but({self.rank, *hosted}, self.rank, stubs)
        if self.first_on_node():
            self.store.remove_holders_but(self.plan.ranks)

    def interrupt_fetch(self) -> None:
        """Let a `fetch` in progress on another thread end with `PeerLost`. Called by any thread."""
        client = self._fetching
        if client is not None:
            client.interrupt()

    def give_up(self) -> None:
        """Free what was reserved, but no window that a predecessor may still be recovered from."""
        if hasattr(self, 'server'):
            self.server.stop()
        if self.log is not None:
            self.log.close()
        if hasattr(self, 'ledger'):
            self.ledger.close()
        if any(window.holder == self.rank for window in self.store.scan()):
            self.store.close()
        else:
            self.store.remove_rank(self.rank)

    def close(self, remove: bool) -> None:
        """Stop serving; with `remove` (a clean exit) delete what this rank keeps."""
        self.server.stop()
        if self.log is not None:
            self.log.close()
        self.ledger.close()
        if remove:
            self.forget_former_places()
            self.store.remove_rank(self.rank)
        else:
            self.store.close()

    def _hosted(self, rank: int) -> dict[int, int]:
        """Bytes of a window file by owner, of those whose replicas `rank` holds."""
        if rank == self.rank and not self._hosts_replicas:
            return {}
        return hosted_by(rank, self.members, self.copies.holders)

    def _stubs(self, rank: int) -> dict[int, int]:
        """Bytes of a file for stubs by owner, of those that `rank` is a twin of."""
        if rank == self.rank and not self._hosts_replicas:
            return {}
        return stubs_at(rank, self.members, self.copies.twins)

    def _plan(self) -> HostMemoryPlan:
        """Bytes of every rank on this node."""
        return node_plan(
            node_name(),
            self.members,
            self.copies,
            self._longest_window,
            self._log_lag,
            self._to_disk,
            holds_none=None if self._hosts_replicas else self.rank,
        )

    def _log_bytes(self, member: Member, window: int | None = None) -> int:
        """Size of a rank's upstream log for windows of that length; None: for the longest."""
        return log_bytes(member, self.members, window or self._longest_window, self._log_lag)


def _exchange_members(own: Member, exchange: Exchange) -> list[Member]:
    encoded = exchange(msgspec.msgpack.encode(own))
    return [msgspec.msgpack.decode(item, type=Member) for item in encoded]
