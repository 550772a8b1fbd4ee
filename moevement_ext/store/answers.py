# SPDX-License-Identifier: Apache-2.0
"""A store that does not answer: its process stands still, or its machine has lost power.

torch waits for an answer as long as there is a connection: for ever if the process is stopped, a
quarter of an hour if the machine is gone (checked against torch 2.15). So the store is asked every
now and then, and when it does not answer, all connections of this process with it are cut: a thread
that waits in one has an error at once, as if the store had died.
"""

import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress

from torch.distributed import DistError, DistNetworkError, Store, TCPStore

logger = logging.getLogger(__name__)

_LOOKS = 10
_ASKED_IN_A_LIMIT = 2
_TO_END_S = 1.0


def in_time[T](ask: Callable[[], T], limit_s: float) -> T:
    """What `ask` returns or raises; `DistNetworkError` after `limit_s` seconds. Any thread.

    `ask` runs on a thread of its own, which is left behind if it does not return in time.
    """
    answer = Future[T]()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:  # raised where it is waited for
            answer.set_exception(error)

    threading.Thread(target=run, name='sparse-ckpt-ask', daemon=True).start()
    for _ in range(_LOOKS):  # this process may be stopped in between, too
        if wait([answer], limit_s / _LOOKS).done:
            return answer.result()
    raise DistNetworkError(f'the store has not answered for {limit_s:g} s')


class AnswerWatch:
    """Cuts this process off a store that does not answer, from a thread of its own, until closed.

    `store` is any connection to it. It is asked twice in `limit_s` seconds, and has as many to
    answer.
    """

    def __init__(self, store: Store, limit_s: float) -> None:
        self._closed = threading.Event()
        self._limit_s = limit_s
        self._store = store
        self._thread = threading.Thread(target=self._run, name='sparse-ckpt-answers', daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; a thread that still waits for an answer is left behind."""
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
                # All ranks look the name up at once at the start, and not all may have an answer.
                addresses = addresses or addresses_of(host, port)
                own = self._asked(own, addresses, port)
            except Exception:  # too many threads or open files, for example: asked again
                if not threading.main_thread().is_alive():
                    return  # no thread can be started any more: the process ends
                if not failed:
                    logger.warning('it is not known whether the store answers', exc_info=True)
                failed = True

    def _asked(self, own: Store | None, addresses: set[str], port: int) -> Store | None:
        """The connection to ask on the next time; None: another one."""
        began = time.monotonic()
        try:
            own = own or in_time(self._store.clone, self._limit_s)
            in_time(own.num_keys, self._limit_s)
        except DistError:  # of a lost connection, others have heard as well
            if time.monotonic() - began >= self._limit_s:
                cut_connections(addresses, port)
            return None
        return own


def addresses_of(host: str, port: int) -> set[str]:
    """All addresses of the name of a store; none if the name is not known any more."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {str(address[0]) for *_, address in found}


def cut_connections(addresses: set[str], port: int) -> None:
    """Shut all connections of this process with a store, whatever thread uses them."""
    for name in os.listdir('/proc/self/fd'):
        with suppress(OSError):  # the listing's own, or closed since
            _cut_if_with(int(name), addresses, port)


def _cut_if_with(fd: int, addresses: set[str], port: int) -> None:
    # No file is opened a second time: to close that would drop all locks of this process on it.
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return
    with socket.socket(fileno=os.dup(fd)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return
        address, its_port = connection.getpeername()[:2]
        if its_port == port and address.removeprefix('::ffff:') in addresses:
            connection.shutdown(socket.SHUT_RDWR)
