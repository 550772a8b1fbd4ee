# SPDX-License-Identifier: Apache-2.0
"""The address under which the other ranks reach this process."""

import os
import socket


def local_host() -> str:
    """IP of the interface that faces the job's master (`MASTER_ADDR`); nothing is sent."""
    master = os.environ.get('MASTER_ADDR', '127.0.0.1')
    family, kind, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
