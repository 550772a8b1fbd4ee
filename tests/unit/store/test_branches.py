# SPDX-License-Identifier: Apache-2.0
"""Branches combine requests of many nodes' proxies to a store; all processes are real."""

import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import NamedTuple

import psutil
import pytest
from torch.distributed import DistError, DistStoreError, TCPStore

from moevement_ext.store.branches import NODES_OF_A_BRANCH, Branches, announce, needed
from moevement_ext.store.proxy import _PAUSE_OF_A_BRANCH_S
from moevement_ext.store.wire import Kind, Request, encoded
from tests.unit.store.processes import WAIT_S, Proxy, Server, until
from tests.unit.store.raw import Raw
from tests.unit.store.relay import Relay

pytestmark = pytest.mark.timed

NODES = 6
BRANCHES = 2


class Watched(NamedTuple):
    """A single branch behind a counting relay, and its nodes."""

    relay: Relay
    branch: int
    """Port of the branch."""
    proxies: list[Proxy]


@pytest.fixture
def branches(server: Server) -> Iterator[Branches]:
    with closing(Branches('127.0.0.1', server.port, BRANCHES)) as made:
        announce(server.connect(), made.ports)
        yield made


@pytest.fixture
def proxies(server: Server, branches: Branches) -> Iterator[list[Proxy]]:
    made = [Proxy(server.port) for _ in range(NODES)]
    yield made
    for proxy in made:
        proxy.close()


@pytest.fixture
def watched(server: Server) -> Iterator[Watched]:
    relay = Relay(server.port)
    with closing(Branches('127.0.0.1', relay.port, 1)) as branches:
        announce(server.connect(), branches.ports)
        proxies = [Proxy(server.port) for _ in range(NODES)]
        for proxy in proxies:
            proxy.connect().num_keys()  # it has found its branch now
        yield Watched(relay, branches.ports[0], proxies)
        for proxy in proxies:
            proxy.close()


def test_only_large_jobs_have_branches() -> None:
    assert needed(NODES_OF_A_BRANCH) == 0
    assert needed(NODES_OF_A_BRANCH + 1) == 2
    assert needed(2048) == 64


def test_nodes_are_spread_evenly_over_the_branches(
    proxies: list[Proxy], server: Server, branches: Branches
) -> None:
    clients = [proxy.connect() for proxy in proxies]
    assert sorted(client.add('count', 1) for client in clients) == [1, 2, 3, 4, 5, 6]
    until(lambda: not any(proxy.connections_to(server.port) for proxy in proxies))
    for port in branches.ports:
        assert sum(bool(proxy.connections_to(port)) for proxy in proxies) == NODES // BRANCHES


def test_each_add_returns_a_unique_number(proxies: list[Proxy], server: Server) -> None:
    clients = [proxy.connect() for proxy in proxies for _ in range(2)]
    with ThreadPoolExecutor(len(clients)) as threads:
        told = threads.map(lambda client: [client.add('n', 1) for _ in range(100)], clients)
        numbers = sorted(number for one in told for number in one)
    assert numbers == list(range(1, 100 * len(clients) + 1))
    assert server.connect().add('n', 0) == numbers[-1]


def test_branch_combines_simultaneous_requests(watched: Watched, server: Server) -> None:
    """Except the first request, which is sent alone."""
    before = watched.relay.nbytes
    watched.proxies[0].connect().add('n', 1)
    bytes_of_one = watched.relay.nbytes - before
    server.stand_still()
    with ExitStack() as opened:
        ports = [proxy.port for proxy in watched.proxies]
        asking = [opened.enter_context(closing(Raw(port))) for port in ports]
        for one in asking:
            one.add(b'n')
        for port in (*ports, watched.branch):
            opened.enter_context(closing(Raw(port))).pass_by()
        server.go_on()
        assert sorted(one.number() for one in asking) == list(range(2, NODES + 2))
    assert watched.relay.nbytes - before <= 3 * bytes_of_one


def test_branch_limits_the_rate_of_requests(
    watched: Watched,
) -> None:
    """Each node asks again as soon as it has a reply, so that a request is always pending.

    A slow machine sends even fewer.
    """
    relay, clients = watched.relay, [proxy.connect() for proxy in watched.proxies]
    clients[0].add('n', 0)
    before, began = relay.nbytes, time.monotonic()
    with ThreadPoolExecutor(NODES) as threads:
        told = threads.map(lambda client: [client.add('n', 1) for _ in range(50)], clients)
        assert len({number for one in told for number in one}) == 50 * NODES
    requests = (relay.nbytes - before) / len(encoded(Request(Kind.ADD, (b'/n',), number=1)))
    assert requests <= (time.monotonic() - began) / _PAUSE_OF_A_BRANCH_S + 2


def test_all_waits_are_woken_and_a_timed_out_client_continues(
    proxies: list[Proxy], server: Server
) -> None:
    clients = [proxy.connect() for proxy in proxies]
    with ThreadPoolExecutor(NODES) as threads:
        waits = [threads.submit(client.wait, ['barrier']) for client in clients[1:]]
        with pytest.raises(DistStoreError):
            clients[0].wait(['barrier'], timedelta(seconds=0.1))
        assert clients[0].add('n', 1) == 1
        assert not any(one.done() for one in waits)
        server.connect().set('barrier', 'open')
        for one in waits:
            one.result(WAIT_S)


def test_nodes_of_a_lost_branch_connect_to_the_store(
    proxies: list[Proxy], server: Server, branches: Branches
) -> None:
    clients = [proxy.connect() for proxy in proxies]
    for client in clients:
        client.add('n', 1)
    branches.close()
    for client in clients:
        with pytest.raises(DistError):
            client.add('n', 1)  # the store may have counted it
    counts = [proxy.connect().add('m', 1) for proxy in proxies]
    assert counts == list(range(1, NODES + 1))
    assert all(proxy.connections_to(server.port) for proxy in proxies)


def test_dead_store_is_lost_to_all_nodes(proxies: list[Proxy], server: Server) -> None:
    idle, waiting = proxies[0].connect(), proxies[1].connect()
    with ThreadPoolExecutor(1) as threads:
        wait = threads.submit(waiting.wait, ['never'])
        idle.num_keys()
        server.close()
        with pytest.raises(DistError):
            wait.result(WAIT_S)
    with pytest.raises(DistError):
        idle.num_keys()


def test_query_for_branches_is_repeated_after_a_silence() -> None:
    greeting, ping = 5, 5
    arrivals: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()

    def greet_and_fall_silent() -> None:
        while True:
            sock, _ = listening.accept()
            while len(sock.recv(greeting + ping, socket.MSG_PEEK)) < greeting + ping:
                pass
            sock.sendall(sock.recv(greeting + ping)[-4:])
            arrivals.put(sock)

    with socket.create_server(('127.0.0.1', 0)) as listening:
        threading.Thread(target=greet_and_fall_silent, daemon=True).start()
        port = listening.getsockname()[1]
        with closing(Proxy(port, to_connect_s=0.5, greeting_s=2 * WAIT_S)) as proxy:
            for _ in range(2):
                with closing(Raw(proxy.port)) as rank:
                    rank.add(b'n')
                    asked = arrivals.get(timeout=WAIT_S)
                    assert asked.recv(64), 'it was asked for its branches'
                    assert rank.is_cut()


def test_branches_end_with_their_parent(server: Server) -> None:
    program = (
        'import signal, sys\n'
        'from moevement_ext.store.branches import Branches\n'
        'Branches("127.0.0.1", int(sys.argv[1]), 2)\n'
        'print("there", flush=True)\n'
        'signal.pause()\n'
    )
    command = [sys.executable, '-c', program, str(server.port)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert owner.stdout is not None and owner.stdout.readline() == b'there\n'
    started = psutil.Process(owner.pid).children()
    assert len(started) == 2
    owner.kill()
    owner.wait()
    gone, alive = psutil.wait_procs(started, timeout=WAIT_S)
    assert len(gone) == 2 and not alive


def test_branch_that_cannot_listen_is_reported() -> None:
    with closing(Server()) as server, pytest.raises(OSError, match='a branch'):
        Branches('127.0.0.1', server.port, 1, '127.0.0.1', first_port=server.port)


@pytest.mark.thorough
def test_store_program_starts_branches_for_many_nodes() -> None:
    command = [sys.executable, '-m', 'moevement_ext.store', '--host', '127.0.0.1', '--port', '0']
    command += ['--nodes', str(NODES_OF_A_BRANCH + 1)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as store:
        assert store.stdout is not None
        port = int(store.stdout.readline().split()[-1].rpartition(':')[2])
        _check_access_through_a_branch(port)
        (server,) = [
            one for one in psutil.Process(store.pid).children() if 'branch' not in one.cmdline()[2]
        ]
        server.kill()
        store.stdout.readline()  # announces the restart
        store.stdout.readline()  # announces the new server
        _check_access_through_a_branch(port)
        store.terminate()


def _check_access_through_a_branch(port: int) -> None:
    store = TCPStore('127.0.0.1', port, is_master=False)
    ports = [int(one) for one in store.get('branches').split()]
    with closing(Proxy(port)) as proxy:
        proxy.connect().set('key', 'value')
        assert store.get('key') == b'value'
        assert sum(proxy.connections_to(one) for one in ports) == 1
