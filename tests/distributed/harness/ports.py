# SPDX-License-Identifier: Apache-2.0
"""Ports for processes that listen later, or again and again."""

import contextlib
import secrets
import socket
from pathlib import Path


def free_port() -> int:
    """A port that stays free until its owner takes it.

    Outside the range from which Linux picks a port when a process connects, or listens on port 0: a
    job does both many times.
    """
    given_away, _ = Path('/proc/sys/net/ipv4/ip_local_port_range').read_text().split()
    while True:
        port = secrets.SystemRandom().randrange(int(given_away) // 2, int(given_away))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(('', port))
            return port


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(('127.0.0.1', port), 1):
        return True
    return False
