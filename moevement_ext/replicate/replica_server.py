# SPDX-License-Identifier: Apache-2.0
"""The server of one rank: replicas it holds, windows on its node, its log and ledger (sec. 3.3).

One thread accepts connections, and each connection has its own thread. No error here reaches
training: the server answers them with `Refused`, or they end the connection. A client that has not
proved that it belongs to the job gets a thread for some seconds and 256 bytes; the number of such
clients is limited.
"""

import os
import socket
import socketserver
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from moevement_ext.errors import HostMemoryError
from moevement_ext.logger import logger_of
from moevement_ext.memory.ledger import Ledger
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.shelf import Shelf
from moevement_ext.memory.upstream_log.record import LogGap
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.refusal import RefusedWindow, UnreadableWindow, joined
from moevement_ext.memory.window.slot import SlotHeader, encode_frame
from moevement_ext.memory.window.twin import TwinWindow, files_of, openers
from moevement_ext.replicate import protocol
from moevement_ext.replicate.connection import Connection, Strangers
from moevement_ext.replicate.inbox import Inbox
from moevement_ext.replicate.secret import admit

if TYPE_CHECKING:  # a process that only holds replicas needs no torch
    from moevement_ext.memory.upstream_log.log import UpstreamLog

logger = logger_of(__name__)

_REFUSALS = (RefusedWindow, HostMemoryError, LogGap, ValueError)
_POLL_S = 0.1  # longest delay of stop()
_GREETING_S = 5.0
_MAX_CONNECTIONS = 512
# Longest wait for a record that is not in the log yet, before the client must ask again.
_LOG_WAIT_S = 0.5


class ReplicaServer:
    """Server for a rank's peers: takes replicas, and serves windows, the rank's log and ledger.

    The training thread calls `serve_log` and `stop`.

    Args:
        inboxes: replicas held here, by owner.
        secret: secret of this start of the job; every client must prove its knowledge.
        host: address to listen on, IPv4 or IPv6.
        port: port to listen on; 0 lets the system choose.
        timeout_s: time for one exchange after its begin, plus time to move its bytes.
        ledger: of this rank; None: refuse requests for it.
    """

    def __init__(
        self,
        store: NodeStore,
        rank: int,
        inboxes: Mapping[int, Inbox],
        secret: bytes,
        host: str = '127.0.0.1',
        port: int = 0,
        timeout_s: float = 30.0,
        ledger: Ledger | None = None,
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._secret = secret
        self._timeout_s = timeout_s
        self._inboxes = inboxes
        self._log: UpstreamLog | None = None
        self._shelf: Shelf | None = None
        self._connections: dict[Connection, threading.Thread] = {}
        self._strangers = Strangers()  # a subset of the connections
        self._lock = threading.Lock()
        self._listener = _Listener((host, port), self)
        self._thread = threading.Thread(
            target=self._listener.serve_forever,
            args=(_POLL_S,),
            name=f'replica-server-{rank}',
            daemon=True,
        )
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port listened on."""
        host, port = self._listener.server_address[:2]
        return str(host), int(port)

    def serve_log(self, log: 'UpstreamLog | None') -> None:
        """Serve this log from now on; None: refuse requests for it."""
        self._log = log

    def serve_shelf(self, shelf: Shelf | None) -> None:
        """Serve these windows of other layouts from now on; None: refuse requests for them."""
        self._shelf = shelf

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
        """Serve a new connection on its own thread, unless there are too many. Listening thread."""
        if not self._has_room():
            connection.close()
            return
        thread = threading.Thread(
            target=self._serve, args=(connection,), name='replica-connection', daemon=True
        )
        with self._lock:
            self._connections[connection] = thread
        self._strangers.add(connection, thread)
        try:
            thread.start()
        except BaseException:  # no thread could be started
            self._forget(connection)
            raise

    def _has_room(self) -> bool:
        with self._lock:
            if len(self._connections) >= _MAX_CONNECTIONS:
                return False
        return self._strangers.make_room()

    def _serve(self, connection: Connection) -> None:
        try:
            connection.set_deadline(_GREETING_S)
            admit(connection, self._secret)
            self._strangers.forget(connection)
            while True:
                connection.set_deadline(None)
                request = connection.receive_request()
                connection.set_deadline(self._timeout_s)
                self._answer(connection, request)
        except OSError as error:
            logger.debug('connection ended: %s', error)
        except Exception:  # bad data of a peer costs only its connection
            logger.exception('connection ended')
        finally:
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        self._strangers.forget(connection)
        with self._lock:
            del self._connections[connection]
        connection.close()

    def _answer(self, connection: Connection, request: protocol.Request) -> None:
        try:
            match request:
                case protocol.FetchWindow():
                    self._send_window(connection, request)
                    return
                case protocol.FetchLog():
                    self._send_record(connection, request)
                    return
                case protocol.FetchHeaders():
                    inbox = self._inbox(request.owner)
                    headers = inbox.headers_after(connection, request.start, self._timeout_s)
                    self._send_headers(connection, headers)
                    return
                case protocol.FetchPart():
                    self._send_headers(connection, self._served_shelf().headers(request.part))
                    return
                case protocol.FetchRanges():
                    _send_ranges(connection, self._served_shelf(), request, self._timeout_s)
                    return
                case protocol.FetchLedger():
                    reply: protocol.Reply = self._entries(request)
                case protocol.PutSlot() | protocol.CommitWindow() | protocol.DiscardAfter():
                    inbox = self._inbox(request.owner)
                    reply = inbox.answer(connection, request, self._timeout_s)
                case _:
                    raise ConnectionError(f'{type(request).__name__} is not expected here')
        except _REFUSALS as refusal:
            unread = isinstance(refusal, UnreadableWindow)
            reply = protocol.Refused(f'{type(refusal).__name__}: {refusal}', unread)
        connection.send(reply)

    def _send_record(self, connection: Connection, request: protocol.FetchLog) -> None:
        if self._log is None:
            raise ValueError('no upstream log is kept here')
        found = self._log.read(request.key, _LOG_WAIT_S)
        if found is None:
            connection.send(protocol.NotYet())
            return
        tensor, data = found
        connection.set_deadline(self._timeout_s, tensor.nbytes)
        connection.send(protocol.LogHead(tensor))
        connection.send_bytes(data)

    def _entries(self, request: protocol.FetchLedger) -> protocol.LedgerEntries:
        if self._ledger is None:
            raise ValueError('no ledger is kept here')
        after = max(request.after, request.to - self._ledger.capacity)
        entries = self._ledger.entries(after, request.to)
        return protocol.LedgerEntries([entry.shared() for entry in entries])

    def _inbox(self, owner: int) -> Inbox:
        if owner not in self._inboxes:
            raise ValueError(f'no replicas of rank {owner} are held here')
        return self._inboxes[owner]

    def _send_window(self, connection: Connection, request: protocol.FetchWindow) -> None:
        """Stream a window.

        The file is never locked: a rename precedes the first overwritten byte, so a check
        after the transfer shows whether all sent bytes were immutable.
        """
        window, inodes, headers = self._open_whole(request)
        slots = {header.slot: [*window.pieces(header.slot)] for header in headers}
        nbytes = sum(len(piece) for pieces in slots.values() for piece in pieces)
        connection.set_deadline(self._timeout_s, nbytes)
        connection.send(protocol.WindowHead(len(slots), nbytes))
        for slot, (frame, *payload) in slots.items():
            connection.send(protocol.SlotHead(slot, sum(map(len, payload)), len(frame)))
            for piece in (frame, *payload):
                connection.send_bytes(piece)
        recycled = [path for path, inode in inodes.items() if _inode(path) != inode]
        if recycled:
            connection.send(protocol.Refused(f'{recycled[0]} was recycled while it was sent'))
        else:
            connection.send(protocol.Ack())

    def _served_shelf(self) -> Shelf:
        if self._shelf is None:
            raise ValueError('windows of other layouts are not served here')
        return self._shelf

    def _send_headers(self, connection: Connection, headers: Sequence[SlotHeader]) -> None:
        frames = [(header.slot, encode_frame(header)) for header in headers]
        nbytes = sum(len(frame) for _, frame in frames)
        connection.set_deadline(self._timeout_s, nbytes)
        connection.send(protocol.WindowHead(len(frames), nbytes))
        for slot, frame in frames:
            connection.send(protocol.SlotHead(slot, 0, len(frame)))
            connection.send_bytes(frame)
        connection.send(protocol.Ack())

    def _open_whole(
        self, request: protocol.FetchWindow
    ) -> tuple[WindowFile | TwinWindow, dict[Path, int | None], list[SlotHeader]]:
        """The first undamaged copy of any holder on this node, with the inodes of its files."""
        expected = Expected(owner=request.owner, name=request.window)
        refusals: list[RefusedWindow] = []
        for found, opened in openers(self._store):
            if (found.owner, found.name) != (request.owner, request.window):
                continue
            inodes = {path: _inode(path) for path in files_of(found.path)}
            try:
                window = opened(found.path)
                return window, inodes, window.verify(expected)
            except RefusedWindow as refusal:
                refusals.append(refusal)
        missing = f'window {request.window} of rank {request.owner} is not on this node'
        raise joined(refusals, missing)


def _send_ranges(
    connection: Connection, shelf: Shelf, request: protocol.FetchRanges, timeout_s: float
) -> None:
    headers = shelf.headers(request.part)
    if request.slot >= len(headers):
        raise ValueError(f'there is no slot {request.slot}')
    pieces = []
    for index, begin, end in request.ranges:
        if index >= len(headers[request.slot].records):
            raise ValueError(f'there is no record {index}')
        record = shelf.read(request.part, request.slot, index)
        if not begin <= end <= len(record):
            raise ValueError(f'record {index} has {len(record)} bytes, not {begin} to {end}')
        pieces.append(record[begin:end])
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    nbytes = sum(map(len, pieces))
    connection.set_deadline(timeout_s, nbytes)
    connection.send(protocol.RangesHead(nbytes, digest.intdigest()))
    for piece in pieces:
        connection.send_bytes(piece)


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
