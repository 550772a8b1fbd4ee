# SPDX-License-Identifier: Apache-2.0
"""Hosts whose names are equal, as of machines that are all called localhost."""

import logging
from pathlib import Path

import msgspec
import pytest
import torch

from moevement_ext.memory.sizing import NOTHING_LOGGED
from moevement_ext.replicate.host_memory import HostMemory
from moevement_ext.replicate.node_plan import Member, Share
from tests.unit.memory.samples import SECRET, capacity, identity_of
from tests.unit.replicate.test_host_memory import settings, shm

__all__ = ['shm']
CPU = torch.device('cpu')


@pytest.mark.parametrize('hosts', [('a/1', 'a/1'), ('localhost/1', 'localhost/2')])
def test_hosts_with_equal_names_are_reported(
    hosts: tuple[str, str], shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By rank 0, once; they are one failure domain, so that there are no replicas."""
    members = [
        msgspec.msgpack.encode(Member('node', capacity(), NOTHING_LOGGED, host, SECRET))
        for host in hosts
    ]
    share = Share(identity_of(0), capacity())
    with caplog.at_level(logging.WARNING):
        memory = HostMemory(
            settings(shm, replicas=1), 'run1', share, CPU, pytest.fail, lambda own: members, SECRET
        )
    assert memory.copies.least() == 0
    assert ("several hosts are called 'node'" in caplog.text) is (hosts[0] != hosts[1])
    memory.close(remove=True)
