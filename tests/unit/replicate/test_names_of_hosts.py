# SPDX-License-Identifier: Apache-2.0
"""Hosts whose names are equal, as of machines that are all called localhost."""

import logging
from pathlib import Path

import pytest

from tests.unit.replicate.peers import host_memory_of, member_of
from tests.unit.replicate.test_host_memory import settings, shm

__all__ = ['shm']


@pytest.mark.parametrize('hosts', [('a/1', 'a/1'), ('localhost/1', 'localhost/2')])
def test_hosts_with_equal_names_are_reported(
    hosts: tuple[str, str], shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By rank 0, once; they are one failure domain, so that there are no replicas."""
    members = [member_of('node', host=host) for host in hosts]
    with caplog.at_level(logging.WARNING):
        memory = host_memory_of(settings(shm, replicas=1), members)
    assert memory.copies.least() == 0
    assert ("several hosts are called 'node'" in caplog.text) is (hosts[0] != hosts[1])
    memory.close(remove=True)
