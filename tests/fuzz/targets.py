# SPDX-License-Identifier: Apache-2.0
"""Readers of untrusted bytes: each target accepts any bytes and allows only documented errors."""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import xxhash

from moevement_ext.errors import HostMemoryError
from moevement_ext.membership import exchange
from moevement_ext.memory import ledger as ledger_module
from moevement_ext.memory.ledger import Ledger
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.upstream_log.record import CorruptLog, Direction, LogKey
from moevement_ext.memory.window import format as window_format
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.memory.window.slot import decode_frame
from moevement_ext.replicate.client import PeerLost, PeerRefused, ReplicaClient, _as_tensor
from moevement_ext.replicate.connection import Connection
from moevement_ext.replicate.replica_server import ReplicaServer
from moevement_ext.replicate.secret import admit, introduce
from tests.unit.memory.samples import (
    SECRET,
    capacity,
    identity_of,
    make_file,
    make_header,
    named,
    tmpfs_directory,
    write_window,
)
from tests.unit.replicate.peers import OWNER, inbox_of_owner, put_window

SECONDS = 20.0
MAX_RECORD_BYTES = 2**20


class Targets:
    """The targets, with real files and servers.

    Args:
        directory: own directory in a tmpfs.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._window = make_file(directory / 'sample')
        self._ledger = directory / 'ledger'
        self._ledger.touch(mode=0o600)
        self._scratch = WindowFile.create(directory / 'scratch', capacity())
        self._errors = _Errors()
        logging.getLogger('moevement_ext').addHandler(self._errors)
        logging.getLogger('moevement_ext').propagate = False
        self._store = NodeStore(directory, 'run1', 'node1')
        self._own_ledger = Ledger(directory / 'own-ledger', 8, identity_of(1))
        self._server = ReplicaServer(
            self._store, 1, inbox_of_owner(self._store), SECRET, ledger=self._own_ledger
        )
        windows = self._server._inboxes[OWNER].windows
        file = windows.begin(named())
        assert file is not None
        write_window(file)
        windows.commit(file)
        self._listener = socket.create_server(('127.0.0.1', 0))
        self.all: dict[str, Callable[[bytes], None]] = {
            'window': self.window,
            'directory': self.directory,
            'frame': self.frame,
            'ledger': self.ledger,
            'server': self.server,
            'client': self.client,
            'packed': self.packed,
        }

    def close(self) -> None:
        self._server.stop()
        self._own_ledger.close()
        self._store.close()
        self._listener.close()

    def window(self, data: bytes) -> None:
        """A window file from its first byte; the rest is valid."""
        content = self._window.array.copy()
        content[: len(data)] = np.frombuffer(data[: content.size], np.uint8)
        _load(content)

    def directory(self, data: bytes) -> None:
        """A directory with a valid checksum; the slots are those of the sample."""
        room = window_format.PREAMBLE_BYTES - window_format._PREAMBLE.size
        encoded = data[:room]
        content = self._window.array.copy()
        version, size = window_format.FORMAT_VERSION, content.size
        checksum = window_format._preamble_checksum(version, size, encoded)
        head = (window_format._MAGIC, version, len(encoded), size, checksum)
        used = window_format._PREAMBLE.pack(*head) + encoded
        content[: len(used)] = np.frombuffer(used, np.uint8)
        _load(content)

    def frame(self, data: bytes) -> None:
        """The header of a slot: as given, and with a valid checksum, in a window."""
        with contextlib.suppress(ValueError):
            decode_frame(data)
        whole = xxhash.xxh3_64_intdigest(data).to_bytes(8, 'little') + data
        with contextlib.suppress(ValueError):
            decode_frame(whole)
        self._scratch.begin(named())
        with contextlib.suppress(RefusedWindow, HostMemoryError):
            self._scratch.write_blob(0, make_header(0).payload_bytes, whole, _zero)

    def ledger(self, data: bytes) -> None:
        """A ledger as given, and one record with a valid checksum."""
        record = data[: ledger_module.RECORD_BYTES - 24]
        rest = (0).to_bytes(8, 'little') + len(record).to_bytes(8, 'little') + record
        checked = xxhash.xxh3_64_intdigest(rest).to_bytes(8, 'little') + rest
        preamble = ledger_module._PREAMBLE.pack(
            ledger_module._MAGIC,
            ledger_module._VERSION,
            ledger_module.RECORD_BYTES,
            ledger_module._digest(identity_of(0)),
            1,
        ).ljust(ledger_module.PREAMBLE_BYTES, b'\0')
        padded = checked.ljust(ledger_module.RECORD_BYTES, b'\0')
        for content in (data, preamble + data, preamble + padded):
            self._ledger.write_bytes(content)
            Ledger.read_newest(self._ledger, identity_of(0))

    def server(self, data: bytes) -> None:
        """Requests of a peer; the first byte selects whether a greeting precedes them."""
        with socket.create_connection(self._server.address, SECONDS) as sock:
            with contextlib.suppress(OSError):
                if data[:1] != b'\0':
                    connection = Connection(sock)
                    connection.set_deadline(SECONDS)
                    assert introduce(connection, SECRET) is None
                sock.sendall(data[1:])
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(2**16):
                    pass
        self._errors.check()

    def client(self, data: bytes) -> None:
        """Replies of a peer; the first byte selects the request."""
        thread = threading.Thread(target=self._answer, args=(data[1:],))
        thread.start()
        client = ReplicaClient(
            self._listener.getsockname(), SECRET, SECONDS, max_record_bytes=MAX_RECORD_BYTES
        )
        documented = (PeerLost, PeerRefused, RefusedWindow, HostMemoryError, CorruptLog)
        with contextlib.suppress(*documented):
            self._ask(client, data[0] % 5 if data else 0)
        client.close()
        thread.join()

    def packed(self, data: bytes) -> None:
        """A value that a rank has left in the store."""
        with contextlib.suppress(ValueError):
            exchange.unpacked(data)
        with contextlib.suppress(ValueError):
            exchange.unpacked(exchange.packed(data), 64)

    def _ask(self, client: ReplicaClient, what: int) -> None:
        match what:
            case 0:
                client.fetch_headers(OWNER, 0)
            case 1:
                client.fetch_window(OWNER, named(), self._scratch)
            case 2:
                record = client.fetch_log(LogKey(1, Direction.DOWN, 0))
                if record is not None:
                    _as_tensor(*record)
            case 3:
                client.fetch_ledger(0, 9)
            case _:
                put_window(client, self._window)

    def _answer(self, data: bytes) -> None:
        with self._listener.accept()[0] as sock, contextlib.suppress(OSError):
            connection = Connection(sock)
            connection.set_deadline(SECONDS)
            admit(connection, SECRET)
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(2**16):
                pass


class _Errors(logging.Handler):
    """Errors that a server has survived also count as defects."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._found.append(self.format(record))

    def check(self) -> None:
        """Raise an assertion if an error was logged."""
        if self._found:
            raise AssertionError(self._found.pop())


def _load(content: np.ndarray) -> None:
    with contextlib.suppress(RefusedWindow):
        path = Path('sample')
        file = WindowFile(path, content, window_format.read_directory(path, content, content.size))
        for slot in file.slots():
            file.slot_blob(slot)
        file.verify(Expected())


def _zero(view: memoryview) -> None:
    view[:] = bytes(len(view))


@contextlib.contextmanager
def opened() -> Iterator[Targets]:
    with tmpfs_directory() as directory:
        targets = Targets(directory)
        try:
            yield targets
        finally:
            targets.close()
