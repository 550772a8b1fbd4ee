# SPDX-License-Identifier: Apache-2.0
"""Sends an owner's windows to the peers that hold its replicas, and fetches them back.

``ReplicaClient`` is one synchronous connection; ``Replicator`` is the background thread that keeps
all peers of one owner up to date (paper sec. 3.3) and never holds up or fails training.
"""

import itertools
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import xxhash

from moevement_ext.errors import SparseCheckpointError
from moevement_ext.memory.log_record import CorruptLog, LoggedTensor, LogKey
from moevement_ext.memory.refused import RefusedWindow
from moevement_ext.memory.slot import SlotHeader, WindowName, frame_checksum
from moevement_ext.memory.window_file import WindowFile
from moevement_ext.replicate.transport import (
    PROTOCOL_VERSION,
    Ack,
    CommitWindow,
    Connection,
    DiscardAfter,
    FetchLog,
    FetchWindow,
    Hello,
    ListWindows,
    LogHead,
    NotYet,
    Persisted,
    Proceed,
    ProtocolError,
    PutSlot,
    Refused,
    RemoteWindow,
    Reply,
    Request,
    SlotHead,
    WindowHead,
    WindowList,
)

logger = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS = 0.1
_LAST_RETRY_SECONDS = 30.0


class PeerLost(ConnectionError):
    """A peer does not answer: dead, unreachable, or slower than the deadline."""


class PeerRefused(SparseCheckpointError):
    """A peer is well but declined; the message is its reason."""


class ReplicaClient:
    """One peer. One thread at a time uses it; it connects on first use and after a loss.

    Every method raises ``PeerLost`` naming the address when the peer does not answer in time, and
    ``PeerRefused`` with the peer's reason. All requests may be repeated safely.

    Args:
        address: host and port of its ``ReplicaServer``.
        token: run identity.
        timeout_s: time for one exchange, besides time to move its bytes.
    """

    def __init__(self, address: tuple[str, int], token: str, timeout_s: float = 30.0) -> None:
        self.address = address
        self._token = token
        self._timeout_s = timeout_s
        self._connection: Connection | None = None

    def put_slot(
        self, owner: int, file: WindowFile, slot: int, persisted: WindowName | None = None
    ) -> None:
        """Send a sealed slot of the window in ``file``; nothing is sent that is there already.

        Args:
            persisted: newest window known to be persisted everywhere; lets the peer recycle.
        """
        name = _name(file)
        blob = file.slot_blob(slot)
        request = PutSlot(
            owner=owner,
            start=name.start,
            plan=name.plan,
            slot=slot,
            payload_bytes=len(blob.payload),
            frame_bytes=len(blob.frame),
            frame_checksum=frame_checksum(blob.frame),
            persisted=persisted,
        )
        with self._exchange(len(blob.payload) + len(blob.frame)) as connection:
            connection.send(request)
            reply = _reply(connection)
            if isinstance(reply, Ack):
                return
            _require(reply, Proceed)
            connection.send_bytes(blob.payload)
            connection.send_bytes(blob.frame)
            _expect(connection, Ack)

    def put_window(self, owner: int, file: WindowFile, persisted: WindowName | None = None) -> None:
        """Send a whole sealed window and commit it there."""
        for slot in file.slots():
            self.put_slot(owner, file, slot, persisted)
        name = _name(file)
        self.commit(owner, name.start, name.plan, file.capacity)

    def commit(self, owner: int, start: int, plan: str, nbytes: int = 0) -> None:
        """Have the peer verify and commit a window whose slots were all sent.

        Args:
            nbytes: size of the window, which the peer needs time to verify.
        """
        self._call(CommitWindow(owner, start, plan), nbytes)

    def persisted(self, owner: int, start: int, plan: str) -> None:
        """Tell the peer that this window is persisted everywhere."""
        self._call(Persisted(owner, start, plan))

    def discard_after(self, owner: int, start: int) -> None:
        """Have the peer drop replicas that begin after ``start`` (-1: all)."""
        self._call(DiscardAfter(owner, start))

    def list_windows(self) -> list[RemoteWindow]:
        """Return all committed windows on the node of the peer."""
        with self._exchange() as connection:
            connection.send(ListWindows())
            return _expect(connection, WindowList).windows

    def fetch_window(
        self,
        owner: int,
        start: int,
        plan: str,
        into: WindowFile,
        received: Callable[[WindowFile, SlotHeader], None] = lambda file, header: None,
    ) -> list[SlotHeader]:
        """Receive a whole window into ``into``, a file being written, and verify it.

        Args:
            received: called with every slot that has come and is undamaged, slot 0 first.

        Returns:
            The headers, slot 0 first.

        Raises:
            RefusedWindow: what arrived is damaged or not the window asked for.
            HostMemoryError: ``into`` is too small.
        """
        into.begin(start, plan)  # forgets what an earlier, interrupted fetch has left
        with self._exchange() as connection:
            connection.send(FetchWindow(owner, start, plan))
            # The peer reads the whole window before it answers; its size is not known yet.
            connection.set_deadline(self._timeout_s, into.capacity)
            head = _expect(connection, WindowHead)
            connection.set_deadline(self._timeout_s, head.nbytes)
            for _ in range(head.slots):
                slot = _expect(connection, SlotHead)
                header = into.write_blob(
                    slot.slot, slot.payload_bytes, slot.frame_bytes, connection.receive_into
                )
                into.verify_payloads([header])
                received(into, header)
            _expect(connection, Ack)
        return into.verify_identity(None, None, owner, start, plan)

    def fetch_log(self, key: LogKey) -> tuple[LoggedTensor, bytearray] | None:
        """Receive and verify one record of the peer's upstream log.

        Returns:
            None: it is not there yet, after the peer has waited for it for a moment; ask again.

        Raises:
            CorruptLog: what arrived is not what was logged.
        """
        with self._exchange() as connection:
            connection.send(FetchLog(key))
            reply = _reply(connection)
            if isinstance(reply, NotYet):
                return None
            tensor = _require(reply, LogHead).tensor
            connection.set_deadline(self._timeout_s, tensor.nbytes)
            data = bytearray(tensor.nbytes)
            connection.receive_into(memoryview(data))
        host, port = self.address
        if xxhash.xxh3_64_intdigest(data) != tensor.checksum:
            raise CorruptLog(f'{key}, from peer {host}:{port}, is damaged: checksum mismatch')
        return tensor, data

    def interrupt(self) -> None:
        """Let an exchange in progress end with ``PeerLost``; from any thread."""
        connection = self._connection
        if connection is not None:
            connection.shutdown()

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _call(self, request: Request, nbytes: int = 0) -> None:
        with self._exchange(nbytes) as connection:
            connection.send(request)
            _expect(connection, Ack)

    @contextmanager
    def _exchange(self, nbytes: int = 0) -> Iterator[Connection]:
        """Yield the connection, with a deadline; leave it usable or closed."""
        try:
            connection = self._connection or self._connect()
            connection.set_deadline(self._timeout_s, nbytes)
            yield connection
        except OSError as error:
            self.close()
            host, port = self.address
            raise PeerLost(f'peer {host}:{port} is lost: {error}') from error
        except PeerRefused:
            raise  # a refusal ends an exchange in order
        except BaseException:
            self.close()  # bytes of this exchange may still be under way
            raise

    def _connect(self) -> Connection:
        sock = socket.create_connection(self.address, timeout=self._timeout_s)
        connection = self._connection = Connection(sock)
        connection.set_deadline(self._timeout_s)
        connection.send(Hello(PROTOCOL_VERSION, self._token))
        try:
            _expect(connection, Ack)
        except PeerRefused:
            self.close()
            raise
        return connection


class _Peer:
    """What the replicator knows of one peer."""

    def __init__(self, client: ReplicaClient) -> None:
        self.client = client
        self.sent: set[tuple[WindowName, int]] = set()
        self.committed: set[WindowName] = set()
        self.discard_after: int | None = None
        self.failures = 0
        self.retry_at = 0.0

    def backoff(self) -> float:
        """Count a failure; return the seconds until the next attempt."""
        delay = min(_FIRST_RETRY_SECONDS * 2.0**self.failures, _LAST_RETRY_SECONDS)
        self.failures = min(self.failures + 1, 16)
        self.retry_at = time.monotonic() + delay
        return delay


class _Job:
    """One window on its way to the peers."""

    def __init__(self, file: WindowFile, name: WindowName, window: int) -> None:
        self.file = file
        self.name = name
        self.window = window
        self.slots: list[int] = []

    @property
    def complete(self) -> bool:
        """All slots were submitted."""
        return len(self.slots) == self.window

    @property
    def recycled(self) -> bool:
        """The file was taken for another window while this one was still to be sent."""
        return self.file.name != self.name


class Replicator:
    """Keeps the replicas of one owner up to date, on one background thread.

    The thread compares what should be at each peer with what is, and does the oldest missing thing
    next: so a lost peer, a retry and a new peer need no handling of their own.

    Args:
        owner: rank whose windows these are.
        peers: clients by rank; they belong to the replicator from now on.
        on_window_replicated: called with (start, plan) once every peer has committed the window.
        on_degraded: called with a reason when a peer is lost, refuses or falls behind; protection
            is reduced until ``on_window_replicated`` is called again. Both callbacks run on the
            replicator's thread.
        max_windows: windows waiting at most; beyond it the oldest is given up.
    """

    def __init__(
        self,
        owner: int,
        peers: Mapping[int, ReplicaClient],
        on_window_replicated: Callable[[int, str], None],
        on_degraded: Callable[[str], None],
        max_windows: int = 2,
    ) -> None:
        self.owner = owner
        self._on_window_replicated = on_window_replicated
        self._on_degraded = on_degraded
        self._max_windows = max_windows
        self._peers = {rank: _Peer(client) for rank, client in peers.items()}
        self._retired: deque[ReplicaClient] = deque()
        self._jobs: deque[_Job] = deque()
        self._reports: deque[str] = deque(maxlen=16)
        self._persisted: WindowName | None = None
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f'replicator-{owner}', daemon=True)
        self._thread.start()

    def submit(self, file: WindowFile, slot: int) -> None:
        """Queue a sealed slot; never blocks. When the last slot was sent the peers commit.

        Called by the sealing thread, or, for a window that is to be sent again (new peers), by
        whoever finds it committed.
        """
        name = _name(file)
        with self._changed:
            job = next((job for job in self._jobs if job.name == name), None)
            if job is None:
                job = _Job(file, name, file.header(slot).window)
                self._jobs.append(job)
                self._give_up_oldest()
            if slot not in job.slots:
                job.slots.append(slot)
            self._changed.notify()

    def abandon(self, start: int, plan: str) -> None:
        """Stop sending a window that was given up or is to be recycled."""
        with self._changed:
            self._drop(WindowName(start, plan))

    def persisted(self, start: int, plan: str) -> None:
        """Note the newest window persisted everywhere; peers learn of it with the next slot."""
        with self._changed:
            self._persisted = WindowName(start, plan)

    def discard_after(self, start: int) -> None:
        """Have all peers drop what begins after ``start``, before anything else is sent."""
        with self._changed:
            for job in [job for job in self._jobs if job.name.start > start]:
                self._drop(job.name)
            for peer in self._peers.values():
                earlier = peer.discard_after
                peer.discard_after = start if earlier is None else min(earlier, start)
                peer.sent = {key for key in peer.sent if key[0].start <= start}
                peer.committed = {name for name in peer.committed if name.start <= start}
            if self._persisted is not None and self._persisted.start > start:
                self._persisted = None
            self._changed.notify()

    def set_peers(self, peers: Mapping[int, ReplicaClient]) -> None:
        """Replace the peers after a recovery; submit committed windows again for new ones."""
        with self._changed:
            self._retired.extend(peer.client for peer in self._peers.values())
            self._peers = {rank: _Peer(client) for rank, client in peers.items()}
            self._changed.notify()

    def stop(self, timeout_s: float = 60.0) -> None:
        """End the thread after the exchange it is in; windows not yet sent are left."""
        self._stopping.set()
        with self._changed:
            self._changed.notify()
        self._thread.join(timeout_s)
        for peer in self._peers.values():
            peer.client.close()

    def _give_up_oldest(self) -> None:
        while len(self._jobs) > self._max_windows:
            late = self._jobs[0].name
            self._drop(late)
            self._reports.append(
                f'replication of rank {self.owner} falls behind: window {late.start} was given up'
            )

    def _drop(self, name: WindowName) -> None:
        self._jobs = deque(job for job in self._jobs if job.name != name)
        for peer in self._peers.values():
            peer.sent = {key for key in peer.sent if key[0] != name}
            peer.committed.discard(name)

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._changed:
                action = self._next_action()
                if action is None:
                    self._changed.wait(self._seconds_to_retry())
                    continue
            try:
                action()
            except Exception:  # replication must not end because a callback fails
                logger.exception('replicator of rank %d', self.owner)

    def _seconds_to_retry(self) -> float | None:
        now = time.monotonic()
        waits = [peer.retry_at - now for peer in self._peers.values() if peer.retry_at > now]
        return min(waits, default=None) if not self._stopping.is_set() else 0.0

    def _next_action(self) -> Callable[[], None] | None:
        """Return the next thing to do; None: nothing, until something changes or a retry is due."""
        if self._reports:
            return partial(self._on_degraded, self._reports.popleft())
        if self._retired:
            return self._retired.popleft().close
        for job in self._jobs:
            if job.recycled:
                self._drop(job.name)
                reason = f'window {job.name.start} was recycled before all replicas had it'
                return partial(self._on_degraded, reason)
            if self._is_replicated(job):
                self._drop(job.name)
                return partial(self._on_window_replicated, *job.name)
        now = time.monotonic()
        due = [(rank, peer) for rank, peer in self._peers.items() if peer.retry_at <= now]
        for rank, peer in due:
            if peer.discard_after is not None:
                return partial(
                    self._attempt, rank, peer, partial(self._discard, peer.discard_after)
                )
        for job, (rank, peer) in itertools.product(self._jobs, due):
            step = self._next_step(peer, job)
            if step is not None:
                return partial(self._attempt, rank, peer, step)
        return None

    def _is_replicated(self, job: _Job) -> bool:
        return job.complete and all(job.name in peer.committed for peer in self._peers.values())

    def _next_step(self, peer: _Peer, job: _Job) -> Callable[[_Peer], None] | None:
        for slot in job.slots:
            if (job.name, slot) not in peer.sent:
                return partial(self._send, job, slot)
        if job.complete and job.name not in peer.committed:
            return partial(self._commit, job)
        return None

    def _send(self, job: _Job, slot: int, peer: _Peer) -> None:
        peer.client.put_slot(self.owner, job.file, slot, self._persisted)
        with self._changed:
            if job in self._jobs:  # not dropped meanwhile
                peer.sent.add((job.name, slot))

    def _commit(self, job: _Job, peer: _Peer) -> None:
        peer.client.commit(self.owner, *job.name, job.file.capacity)
        with self._changed:
            if job in self._jobs:
                peer.committed.add(job.name)

    def _discard(self, start: int, peer: _Peer) -> None:
        peer.client.discard_after(self.owner, start)
        with self._changed:
            if peer.discard_after == start:  # not asked for again meanwhile
                peer.discard_after = None

    def _attempt(self, rank: int, peer: _Peer, step: Callable[[_Peer], None]) -> None:
        """Take one step with one peer; on failure let it rest and start over with it later."""
        try:
            step(peer)
            peer.failures = 0
        except (PeerLost, PeerRefused, RefusedWindow) as error:
            with self._changed:
                # It may have restarted and lost what it had received: offer all slots again.
                peer.sent.clear()
                delay = peer.backoff()
            self._on_degraded(f'replica on rank {rank}: {error}; next attempt in {delay:.1f} s')


def _name(file: WindowFile) -> WindowName:
    if file.name is None:
        raise ValueError(f'{file.path} holds no window')
    return file.name


def _expect[Expected: Reply](connection: Connection, expected: type[Expected]) -> Expected:
    return _require(_reply(connection), expected)


def _reply(connection: Connection) -> Reply:
    reply = connection.receive_reply()
    if isinstance(reply, Refused):
        raise PeerRefused(reply.reason)
    return reply


def _require[Expected: Reply](reply: Reply, expected: type[Expected]) -> Expected:
    if not isinstance(reply, expected):
        raise ProtocolError(f'unexpected answer {type(reply).__name__}')
    return reply
