# SPDX-License-Identifier: Apache-2.0
"""Queries of the store, which wait neither for a missing key nor forever for an answer.

torch waits for an answer as long as the connection exists: forever if the store's process is
stopped, a quarter of an hour if its machine is gone (checked against torch 2.15). So a thread
queries the store from time to time. If the store does not answer, the thread shuts down all
connections of this process to it: a thread that waits on one of them gets an error at once, as if
the store had died.
"""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from torch.distributed import DistError, Store, TCPStore

from moevement_ext.logger import logger_of
from moevement_ext.regroup.waits import in_time
from moevement_ext.system.process_setup import connections

logger = logger_of(__name__)

_ASKED_IN_A_LIMIT = 2
_TO_END_S = 1.0


class AnswerWatch:
    """Shuts this process's connections to a store that does not answer, on a separate thread.

    Runs until closed. `store` is any connection to the store, which is queried twice in `limit_s`
    seconds, and has `limit_s` seconds to answer.
    """

    def __init__(self, store: Store, limit_s: float) -> None:
        self._closed = threading.Event()
        self._limit_s = limit_s
        self._store = store
        self._thread = threading.Thread(target=self._run, name='sparse-ckpt-answers', daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; a thread that still waits for an answer is abandoned."""
        self._closed.set()
        self._thread.join(_TO_END_S)

    def _run(self) -> None:
        store = self._store
        if not isinstance(store, TCPStore):
            return
        host, port = store.host, store.port
        addresses: set[str] = set()
        own: Store | None = None
        failed = False
        while not self._closed.wait(self._limit_s / _ASKED_IN_A_LIMIT):
            try:
                # Repeated after a failure: all ranks look the name up at the start, and some may
                # get no answer.
                addresses = addresses or addresses_of(host, port)
                own = self._asked(own, addresses, port)
            # For example too many threads or open files; the next round tries again.
            except Exception:
                if not threading.main_thread().is_alive():
                    return  # the process is ending, and no thread can start any more
                if not failed:
                    logger.warning('it is not known whether the store answers', exc_info=True)
                failed = True

    def _asked(self, own: Store | None, addresses: set[str], port: int) -> Store | None:
        """Query the store; returns the connection for the next query, None for a new one."""
        began = time.monotonic()
        try:
            own = own or in_time(self._store.clone, self._limit_s)
            in_time(own.num_keys, self._limit_s)
        except DistError:  # other threads detect a lost connection by themselves
            if time.monotonic() - began >= self._limit_s:
                cut_connections(addresses, port)
            return None
        return own


def addresses_of(host: str, port: int) -> set[str]:
    """All addresses of a host name; none if the name cannot be resolved."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {str(address[0]) for *_, address in found}


def cut_connections(addresses: set[str], port: int) -> None:
    """Shut down all connections of this process to a store, whichever thread uses them."""
    for _, connection in connections():
        with suppress(OSError):  # it is not connected, or no longer
            address, its_port = connection.getpeername()[:2]
            if its_port == port and address.removeprefix('::ffff:') in addresses:
                connection.shutdown(socket.SHUT_RDWR)


# A value that the engine never stores.
_NEVER = '\0'
# The store serves no other client while it collects an answer.
_READ_AT_ONCE = 256


def peek(store: Store, key: str) -> bytes | None:
    """The value of a key, None if it is not set; costs one request.

    Must not be used for a key that other clients wait for: torch's server would wake them up, as if
    the key were set. `check` does not wake them. `get` waits for the key, and costs two requests.
    """
    # On a missing key, compare_set changes nothing, and returns the expected value.
    found = bytes(store.compare_set(key, _NEVER, _NEVER))
    return None if found == _NEVER.encode() else found


def read_in_parts(store: Store, keys: Sequence[str]) -> Iterator[bytes]:
    """The values of existing keys, in order, with one request per part of the keys.

    So other clients are served in between, however many ranks the job has.
    """
    for at in range(0, len(keys), _READ_AT_ONCE):
        yield from store.multi_get(list(keys[at : at + _READ_AT_ONCE]))
