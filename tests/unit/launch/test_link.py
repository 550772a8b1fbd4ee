# SPDX-License-Identifier: Apache-2.0
"""Agents are accepted, whatever other clients connect."""

import resource
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest

from moevement_ext.launch import link as module
from moevement_ext.launch.agent import connect
from moevement_ext.launch.link import Address, Beats, Listener
from moevement_ext.launch.messages import SILENT_S, Alive
from moevement_ext.replicate.connection import MOST_STRANGERS
from moevement_ext.replicate.secret import new_secret
from tests.support.readable import readable
from tests.unit.launch.on_hosts import connected

pytestmark = [pytest.mark.timed, pytest.mark.timeout(60)]
SECRET = new_secret()


@pytest.fixture
def listener() -> Iterator[Listener]:
    one = Listener(SECRET)
    yield one
    one.close()


def arrived(listener: Listener) -> list[str]:
    assert readable(listener.fd, 120.0)
    return [here.host for here, _ in listener.take()]


def test_unauthenticated_clients_take_bounded_threads_and_descriptors(listener: Listener) -> None:
    """Agents are still accepted: the oldest unauthenticated connection is closed."""
    process = psutil.Process()
    before = process.num_threads(), process.num_fds()
    with ExitStack() as strangers:
        for number in range(200):
            stranger = socket.create_connection(('127.0.0.1', listener.port))
            strangers.callback(stranger.close)
            if number % 50 == 49:
                connect(Address('127.0.0.1', listener.port, SECRET), str(number), [])
                assert arrived(listener) == [str(number)]
        assert process.num_threads() <= before[0] + MOST_STRANGERS
        assert (
            process.num_fds() <= before[1] + 200 + MOST_STRANGERS + 4 * 5
        )  # an agent has two descriptors on each side


@pytest.mark.parametrize('host', ['127.0.0.1', '::1'])
def test_agents_connect_over_ipv4_and_ipv6(listener: Listener, host: str) -> None:
    """The name of the launcher's host may resolve to an IPv6 address only."""
    if host == '::1' and not socket.has_dualstack_ipv6():
        pytest.skip('no IPv6 here')
    connect(Address(host, listener.port, SECRET), 'a', [])
    assert arrived(listener) == ['a']


def test_listener_survives_too_many_open_files(listener: Listener) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        agent = socket.socket()
        stack.callback(agent.close)
        resource.setrlimit(resource.RLIMIT_NOFILE, (agent.fileno() + 1, limits[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        agent.connect(('127.0.0.1', listener.port))
        threading.Event().wait(0.2)  # if it were accepted later, this test would prove nothing
    connect(Address('127.0.0.1', listener.port, SECRET), 'a', [])
    assert arrived(listener) == ['a']


def test_heartbeats_reach_agents_while_the_launcher_is_busy() -> None:
    listener = Listener(SECRET)
    there = connect(Address('127.0.0.1', listener.port, SECRET), 'a', [])
    assert readable(listener.fd, 120.0)
    [(_, link)] = listener.take()
    beats = Beats(lambda: [link])
    for _ in range(3):
        assert isinstance(there.receive(), Alive)
    beats.close()
    link.close()
    with pytest.raises(OSError):
        while True:
            there.receive()
    listener.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(module.time, 'monotonic', lambda: now[0])
    return now


def test_time_between_checks_does_not_count_as_silence(clock: list[float]) -> None:
    """Slurm may suspend all processes of a job, which is no loss."""
    other, link = connected()
    clock[0] += 3600.0
    assert link.silent_s < SILENT_S / 2
    for _ in range(int(SILENT_S) + 1):  # one check per second
        clock[0] += 1.0
        silent_s = link.silent_s
    assert silent_s > SILENT_S
    other.send(Alive())
    select.select([link.fd], [], [], 60)
    assert link.silent_s == 0.0
    assert link.receive() == Alive()
    clock[0] += 1.0
    assert link.silent_s == 1.0
    link.close()
    other.close()
