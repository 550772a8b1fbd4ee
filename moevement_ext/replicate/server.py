# SPDX-License-Identifier: Apache-2.0
"""Holds replicas of other owners' windows, serves every window on its node (paper sec. 3.3) and the
upstream log of its rank.

One thread accepts, one thread per connection works. Nothing here ever raises into training: what
goes wrong is answered with `Refused` or ends the connection. Whoever has not proved to belong to
the job gets a thread for some seconds and 256 bytes, and only so many at a time.
"""

import logging
import os
import socket
import socketserver
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moevement_ext.memory.budget import HostMemoryError
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.upstream_log.record import LogGap
from moevement_ext.memory.window.expected import Expected
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import WindowName
from moevement_ext.memory.window.refused import RefusedWindow
from moevement_ext.memory.window.slot import SlotHeader, encode_frame, frame_checksum
from moevement_ext.replicate import greeting
from moevement_ext.replicate.connection import Connection, ProtocolError
from moevement_ext.replicate.protocol import (
    Ack,
    CommitWindow,
    DiscardAfter,
    FetchHeaders,
    FetchLog,
    FetchWindow,
    LogHead,
    NotYet,
    Proceed,
    PutSlot,
    Refused,
    Reply,
    Request,
    SlotHead,
    WindowHead,
)

if TYPE_CHECKING:  # a holder of replicas alone needs no torch
    from moevement_ext.memory.upstream_log.log import UpstreamLog

logger = logging.getLogger(__name__)

_REFUSALS = (RefusedWindow, HostMemoryError, LogGap, ValueError)
_POLL_SECONDS = 0.1  # longest delay of stop()
_GREETING_SECONDS = 5.0
_MAX_STRANGERS = 32
"""Connections that have not greeted yet; the oldest gives way, so that peers always get in."""
_MAX_CONNECTIONS = 512
_LOG_WAIT_SECONDS = 0.5
"""A record that is not in the log yet is waited for so long before the client must ask again."""


class ReplicaServer:
    """Receives replicas for `rank` to hold; serves the windows on its node and the rank's log.

    Args:
        store: store of this node.
        rank: the holder.
        capacities: bytes of a window file, by owner this rank holds replicas for.
        secret: of this life of the job; every client must prove that it knows it.
        host: address to listen on, of either family: the one that is announced.
        port: 0 lets the system choose.
        generations: replica windows kept per owner.
        timeout_s: time for one exchange once it has begun, besides time to move its bytes.

    Raises:
        HostMemoryError: the replica files cannot be reserved.
    """

    def __init__(
        self,
        store: NodeStore,
        rank: int,
        capacities: Mapping[int, int],
        secret: bytes,
        host: str = '127.0.0.1',
        port: int = 0,
        generations: int = 3,
        timeout_s: float = 30.0,
    ) -> None:
        self._store = store
        self._secret = secret
        self._timeout_s = timeout_s
        self._inboxes = {
            owner: _Inbox(OwnerWindows(store, rank, owner, capacity, generations))
            for owner, capacity in capacities.items()
        }
        self._log: UpstreamLog | None = None
        self._connections: dict[Connection, threading.Thread] = {}
        self._strangers: dict[Connection, threading.Thread] = {}  # of them, oldest first
        self._lock = threading.Lock()
        self._listener = _Listener((host, port), self)
        self._thread = threading.Thread(
            target=self._listener.serve_forever,
            args=(_POLL_SECONDS,),
            name=f'replica-server-{rank}',
            daemon=True,
        )
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Interface and port listened on."""
        host, port = self._listener.server_address[:2]
        return str(host), int(port)

    def serve_log(self, log: 'UpstreamLog | None') -> None:
        """Serve this log from now on; None: refuse to."""
        self._log = log

    def stop(self) -> None:
        """Stop listening and close all connections; files stay."""
        self._listener.shutdown()
        self._listener.server_close()
        with self._lock:
            open_now = dict(self._connections)
        for connection in open_now:
            connection.shutdown()
        for thread in [self._thread, *open_now.values()]:
            thread.join(self._timeout_s)

    def accept(self, connection: Connection) -> None:
        """Serve a new connection on a thread of its own, if there is room for it."""
        if not self._has_room():
            connection.close()
            return
        thread = threading.Thread(
            target=self._serve, args=(connection,), name='replica-connection', daemon=True
        )
        with self._lock:
            self._connections[connection] = self._strangers[connection] = thread
        try:
            thread.start()
        except BaseException:  # no more threads
            self._forget(connection)
            raise

    def _has_room(self) -> bool:
        """Make room among the strangers if need be; only the accepting thread takes it."""
        with self._lock:
            if len(self._connections) >= _MAX_CONNECTIONS:
                return False
            if len(self._strangers) < _MAX_STRANGERS:
                return True
            oldest, thread = next(iter(self._strangers.items()))
        oldest.shutdown()
        thread.join(_POLL_SECONDS)
        return not thread.is_alive()

    def _serve(self, connection: Connection) -> None:
        """Serve one connection until it ends."""
        try:
            connection.set_deadline(_GREETING_SECONDS)
            greeting.admit(connection, self._secret)
            with self._lock:
                del self._strangers[connection]
            while True:
                connection.set_deadline(None)
                request = connection.receive_request()
                connection.set_deadline(self._timeout_s)
                self._answer(connection, request)
        except OSError as error:
            logger.debug('connection ended: %s', error)
        except Exception:  # whatever a peer has sent, it costs no more than its connection
            logger.exception('connection ended')
        finally:
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        with self._lock:
            self._strangers.pop(connection, None)
            del self._connections[connection]
        connection.close()

    def _answer(self, connection: Connection, request: Request) -> None:
        try:
            match request:
                case FetchWindow():
                    self._send_window(connection, request)
                    return
                case FetchLog():
                    self._send_record(connection, request)
                    return
                case FetchHeaders():
                    self._send_headers(connection, request)
                    return
                case PutSlot() | CommitWindow() | DiscardAfter():
                    inbox = self._inbox(request.owner)
                    reply: Reply = inbox.answer(connection, request, self._timeout_s)
                case _:
                    raise ProtocolError(f'{type(request).__name__} is not expected here')
        except _REFUSALS as refusal:
            reply = Refused(f'{type(refusal).__name__}: {refusal}')
        connection.send(reply)

    def _send_record(self, connection: Connection, request: FetchLog) -> None:
        if self._log is None:
            raise ValueError('no upstream log is kept here')
        found = self._log.read(request.key, _LOG_WAIT_SECONDS)
        if found is None:
            connection.send(NotYet())
            return
        tensor, data = found
        connection.set_deadline(self._timeout_s, tensor.nbytes)
        connection.send(LogHead(tensor))
        connection.send_bytes(data)

    def _inbox(self, owner: int) -> '_Inbox':
        if owner not in self._inboxes:
            raise ValueError(f'no replicas of rank {owner} are held here')
        return self._inboxes[owner]

    def _send_window(self, connection: Connection, request: FetchWindow) -> None:
        """Stream a window. Its files are never locked: a rename before the first overwritten byte
        tells afterwards whether all that was sent was still immutable."""
        path, inode, file = self._open_whole(request)
        blobs = {slot: file.slot_blob(slot) for slot in file.slots()}
        nbytes = sum(len(blob.payload) + len(blob.frame) for blob in blobs.values())
        connection.set_deadline(self._timeout_s, nbytes)
        connection.send(WindowHead(len(blobs), nbytes))
        for slot, blob in blobs.items():
            connection.send(SlotHead(slot, len(blob.payload), len(blob.frame)))
            connection.send_bytes(blob.payload)
            connection.send_bytes(blob.frame)
        if _inode(path) == inode:
            connection.send(Ack())
        else:
            connection.send(Refused(f'{path} was recycled while it was sent'))

    def _send_headers(self, connection: Connection, request: FetchHeaders) -> None:
        inbox = self._inbox(request.owner)
        headers = inbox.headers_after(connection, request.start, self._timeout_s)
        frames = [(header.slot, encode_frame(header)) for header in headers]
        nbytes = sum(len(frame) for _, frame in frames)
        connection.set_deadline(self._timeout_s, nbytes)
        connection.send(WindowHead(len(frames), nbytes))
        for slot, frame in frames:
            connection.send(SlotHead(slot, 0, len(frame)))
            connection.send_bytes(frame)
        connection.send(Ack())

    def _open_whole(self, request: FetchWindow) -> tuple[Path, int | None, WindowFile]:
        """Return path, inode and map of the first undamaged copy on this node, whoever holds it."""
        expected = Expected(owner=request.owner, name=request.window)
        refusals: list[str] = []
        for found in self._store.scan():
            if (found.owner, found.name) != (request.owner, request.window):
                continue
            inode = _inode(found.path)
            try:
                file = WindowFile.open(found.path)
                file.verify(expected)
                return found.path, inode, file
            except RefusedWindow as refusal:
                refusals.append(str(refusal))
        missing = f'window {request.window} of rank {request.owner} is not on this node'
        raise RefusedWindow('; '.join(refusals) or missing)


class _Inbox:
    """Replicas of one owner. A lock admits one exchange at a time."""

    def __init__(self, windows: OwnerWindows) -> None:
        self.windows = windows
        self._receiving: WindowFile | None = None
        self._lock = threading.Lock()
        self._current: Connection | None = None

    def answer(
        self,
        connection: Connection,
        request: PutSlot | CommitWindow | DiscardAfter,
        timeout_s: float,
    ) -> Reply:
        """Do what the owner asks; raises `RefusedWindow` or `ValueError` for a refusal."""
        with self._admitted(connection, timeout_s):
            return self._dispatch(connection, request, timeout_s)

    def headers_after(
        self, connection: Connection, start: int, timeout_s: float
    ) -> list[SlotHeader]:
        """Headers of what was received of windows after `start`; errors as of `answer`."""
        with self._admitted(connection, timeout_s):
            return self.windows.headers_after(start)

    @contextmanager
    def _admitted(self, connection: Connection, timeout_s: float) -> Iterator[None]:
        # An older connection of this owner may still be receiving into the file: cut it off, or
        # what the kernel has buffered for it would be written under the newer transfer.
        stale = self._current
        if stale is not None and stale is not connection:
            stale.shutdown()
        if not self._lock.acquire(timeout=timeout_s):
            raise ValueError('an earlier transfer of this owner does not end')
        try:
            self._current = connection
            yield
        finally:
            self._current = None
            self._lock.release()

    def _dispatch(
        self,
        connection: Connection,
        request: PutSlot | CommitWindow | DiscardAfter,
        timeout_s: float,
    ) -> Reply:
        match request:
            case PutSlot():
                return self._put(connection, request, timeout_s)
            case CommitWindow():
                self._commit(request.window)
            case DiscardAfter():
                self.windows.discard_after(request.start)
                self._forget_discarded(request.start)
        return Ack()

    def _put(self, connection: Connection, request: PutSlot, timeout_s: float) -> Reply:
        if request.persisted is not None:
            self.windows.persisted(request.persisted)
        file = self._file_for(request.window)
        if request.slot in file.slots():
            if frame_checksum(file.slot_blob(request.slot).frame) == request.frame_checksum:
                return Ack()
            if file is not self._receiving:
                raise ValueError(f'committed window {request.window} has other content')
            self._abandon()  # left from an attempt the owner has given up
            file = self._file_for(request.window)
        file.reserve_slot(request.slot, request.payload_bytes)  # refuse before bytes are sent
        nbytes = request.payload_bytes + request.frame_bytes
        connection.set_deadline(timeout_s, nbytes)
        connection.send(Proceed())
        file.write_blob(
            request.slot, request.payload_bytes, request.frame_bytes, connection.receive_into
        )
        return Ack()

    def _file_for(self, name: WindowName) -> WindowFile:
        """The committed window of this name, or the one being received, begun if need be."""
        committed = self.windows.file(name)
        if committed is not None:
            return committed
        if self._receiving is not None and self._receiving.name != name:
            self._abandon()
        if self._receiving is None:
            self._receiving = self.windows.begin(name)
        if self._receiving is None:
            raise ValueError(
                f'no free file for window {name} of rank {self.windows.owner}: '
                f'all hold windows not known to be outdated '
                f'(newest persisted: {self.windows.newest_persisted})'
            )
        return self._receiving

    def _commit(self, name: WindowName) -> None:
        if self.windows.file(name) is None:
            file = self._receiving
            if file is None or file.name != name:
                raise ValueError(f'window {name} was not received here')
            try:
                file.verify(Expected(owner=self.windows.owner, name=name))
                self.windows.commit(file)
            except RefusedWindow:
                self._abandon()  # the owner sends it again from the first slot
                raise
            self._receiving = None
        self.windows.announce(name)  # the acknowledgement lets the owner rely on it

    def _abandon(self) -> None:
        if self._receiving is not None:
            self.windows.abandon(self._receiving)
            self._receiving = None

    def _forget_discarded(self, start: int) -> None:
        name = None if self._receiving is None else self._receiving.name
        if name is not None and name.start > start:
            self._receiving = None  # discard_after has freed its file


def _inode(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None


class _Listener(socketserver.TCPServer):
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], owner: ReplicaServer) -> None:
        self.owner = owner
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, socketserver.BaseRequestHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.owner.accept(Connection(request))

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug('connection from %s failed', client_address, exc_info=True)
