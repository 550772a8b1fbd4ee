# SPDX-License-Identifier: Apache-2.0
"""Serves the store in which the ranks of a job meet, on a host that is no training node.

    moevement store --host 10.0.0.5 --port 29400

The job gets `--sparse-ckpt-store 10.0.0.5:29400`, and keeps its store when it loses a node. A child
process serves the store. If it dies, another one takes its place at once, with an empty store, and
the job restarts from windows in host memory. SIGTERM ends the program.
"""

import argparse
import ctypes
import ipaddress
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from moevement_ext.config import ConfigurationError, SparseCheckpointConfig
from moevement_ext.system import leaving
from moevement_ext.system.process_setup import ask_again_soon

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_TO_CONNECT = timedelta(seconds=60)
_RUN = 'run'


def use_outside_store(config: SparseCheckpointConfig, run_id: str, timeout: timedelta) -> None:
    """Make this process use the store of `--sparse-ckpt-store`, if given, from now on.

    Replaces the launcher's store in the environment. Called once, before the first rendezvous,
    whose limit is `timeout`. Raises `ConfigurationError` if no store answers there, or it serves
    another run than `run_id`.
    """
    if config.store is None:
        return
    host, port = config.store_address
    store = connect(host, port, min(timeout, _TO_CONNECT))
    served = store.compare_set(_RUN, '', run_id).decode()
    if served != run_id:
        raise ConfigurationError(
            f'--sparse-ckpt-store {config.store} serves the run {served}, not {run_id}: start a '
            'store for each job (moevement store).'
        )
    os.environ |= {
        'MASTER_ADDR': host,
        'MASTER_PORT': str(port),
        'TORCHELASTIC_USE_AGENT_STORE': 'True',
    }


def connect(host: str, port: int, timeout: timedelta) -> 'TCPStore':
    """Connect to the store, which may still be starting, or raise `ConfigurationError`."""
    from torch.distributed import DistError, TCPStore  # too slow for --help

    from moevement_ext.regroup.waits import in_time

    limit_s = timeout.total_seconds()
    try:
        return in_time(lambda: TCPStore(host, port, is_master=False, timeout=timeout), limit_s)
    except DistError as error:
        reason = (str(error).splitlines() or ['no reason given'])[0]
        raise ConfigurationError(
            f'--sparse-ckpt-store {host}:{port} is not reached: start moevement store '
            f'--host {host} --port {port} there ({reason}).'
        ) from error


# All ranks connect at the same time.
_BACKLOG = 16384
_PR_SET_PDEATHSIG = 1
_ENDS = (signal.SIGTERM, signal.SIGINT)
# Pause before the next process, after one that died at once.
_PAUSE_S = 1.0


def allow_many_connections() -> None:
    """Raise the limit of open files as far as possible, as every worker has some connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def listen(host: str, port: int) -> socket.socket:
    """Listen on one address of this host only; a `ConfigurationError` names the flags."""
    try:
        if not 0 <= port < 65536:
            raise OSError('there is no such port')
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        if ipaddress.ip_address(address[0]).is_unspecified:
            raise OSError('that stands for all addresses, and is none to connect to')
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigurationError(
            f'--host {host} --port {port}: cannot listen there ({error}); give an address of this '
            'host, and a free port or 0.'
        ) from error


def keep_serving(listening: socket.socket, host: str) -> int:
    """Run a serving process, and another one when it dies; returns a received ending signal.

    Clients that connect in between wait. `host` is for the log. The calling process must not have
    other threads.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (*_ENDS, signal.SIGCHLD))
    while True:
        began = time.monotonic()
        server = _start(listening, host)
        if ended_by := _signal_to_end(server):
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)
            return ended_by
        _print(f'process {server} died; another one serves, empty')
        if time.monotonic() < began + _PAUSE_S:
            time.sleep(_PAUSE_S)


def _signal_to_end(server: int) -> int:
    """Wait for an ending signal; 0 once the serving process is dead."""
    while (received := signal.sigwait((*_ENDS, signal.SIGCHLD))) not in _ENDS:
        ended, _ = os.waitpid(server, os.WNOHANG)
        if ended:  # otherwise it was stopped or continued
            return 0
    return received


def _start(listening: socket.socket, host: str) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        _serve(listening, host)
    return pid


def _serve(listening: socket.socket, host: str) -> NoReturn:
    from torch.distributed import TCPStore

    address, port = listening.getsockname()[:2]
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    _print(
        f'process {os.getpid()} serves at {host}:{port}; the program gets '
        f'--sparse-ckpt-store {host}:{port}'
    )
    while store:  # torch serves on a separate thread as long as the object lives
        signal.pause()
    raise AssertionError('a store is something')


def _print(what: str) -> None:
    with suppress(OSError):  # a full disk or a closed pipe must not end the server
        print(f'[store] {what}', flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status of a process killed by the signal.

    With status 0 the program would count as completed, and Kubernetes would not replace a deleted
    pod, for example of a drained node.
    """
    ask_again_soon()
    args = parse_arguments(argv)
    allow_many_connections()
    with leaving.in_one_line():
        listening = listen(args.host, args.port)
    return 128 + keep_serving(listening, args.host)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = leaving.Parser('moevement store', description=__doc__, allow_abbrev=False)
    about = 'Name or address at which all nodes of the job can reach this host.'
    parser.add_argument('--host', required=True, help=about)
    about = 'Default: %(default)s; 0: a free port.'
    parser.add_argument('--port', type=int, default=29400, help=about)
    return parser.parse_args(argv)


if __name__ == '__main__':
    sys.exit(main())
