# SPDX-License-Identifier: Apache-2.0
"""The launcher's events are written to its file, line by line, and passed on."""

from pathlib import Path

import pytest

from moevement_ext.config import ConfigurationError
from moevement_ext.events import Event, decode
from moevement_ext.launch.launcher_events import (
    FILE,
    FaultStaged,
    GuestsSeated,
    JobRecovered,
    Journal,
    MemoryKept,
    NodeLost,
    SpareEnded,
    StoreFound,
    StoreGone,
    WorkerEnded,
)

EVENTS = [
    WorkerEnded(1, 71, -9),
    SpareEnded(5, 1, was_ready=False),
    NodeLost('b', None, 'its agent is gone'),
    GuestsSeated('b', 3, '3 of 4 nodes; node 3 is a guest of b', 1),
    FaultStaged('--kill-node 1@3', '/dev/shm/run/node1'),
    StoreGone(None),
    StoreFound(),
    MemoryKept('/dev/shm/run'),
    JobRecovered('RECOVERED', '1 hot'),
]


def test_events_are_decoded_as_written(tmp_path: Path) -> None:
    handed_on: list[Event] = []
    journal = Journal(tmp_path, handed_on.append)
    for event in EVENTS:
        journal(event)
    journal.close()
    found = list(decode((tmp_path / FILE).read_bytes()))
    assert handed_on == EVENTS
    assert [type(event) for event in found] == [type(event) for event in EVENTS]
    assert [str(event) for event in found] == [str(event) for event in EVENTS]
    assert all(event.time > 1e9 for event in found)


def test_foreign_file_is_refused_with_its_flag(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('minutes of a rendezvous')
    with pytest.raises(ConfigurationError, match=r'--log-dir .*something else than events'):
        Journal(tmp_path, print)
