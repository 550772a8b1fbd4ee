# SPDX-License-Identifier: Apache-2.0
"""Measurement of the silence of a peer."""

import select

import pytest

from moevement_ext.launch import link as module
from moevement_ext.launch.messages import SILENT_S, Alive
from tests.unit.launch.on_hosts import connected


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
