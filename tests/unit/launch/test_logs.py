# SPDX-License-Identifier: Apache-2.0
"""Logs of workers and the file of events, as the supervisor writes them."""

import os
from pathlib import Path

import pytest

from moevement_ext.config import ConfigurationError
from moevement_ext.events import Event, decode
from moevement_ext.launch import machine
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
from tests.unit.launch.conftest import Job, ended

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]


def test_all_attempts_of_a_rank_share_one_log(job: Job, tmp_path: Path) -> None:
    logs = tmp_path / 'made' / 'logs'
    job.finish_when = lambda: len(job.started(0)) == 2
    flags = ('0.0=print:first', '0.0=kill', '0.1=print:second', '1.0=print:other')
    assert job.run(*flags, nodes=2, log_dir=logs) == 0
    assert (logs / 'rank0.log').read_text() == 'importing\nfirst\nimporting\nsecond\n'
    assert (logs / 'rank1.log').read_text() == 'importing\nother\n'


def test_without_logs_each_line_names_the_rank(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.finish_when = lambda: len(job.started(0)) == 2
    assert job.run('0.0=print:first', '0.0=kill', '0.1=print:second', nodes=2) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == [
        '[rank 0] first',
        *['[rank 0] importing'] * 2,
        '[rank 0] second',
        '[rank 1] importing',
    ]


def test_workers_survive_the_loss_of_the_log_directory(
    job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / 'logs'

    def lose(event: Event) -> None:
        if isinstance(event, WorkerEnded) and logs.exists():
            logs.rename(tmp_path / 'old')

    job.on_event = lose
    job.finish_when = lambda: len(job.started(1)) == 2
    assert job.run('1.0=kill', '1.1=print:here', nodes=2, log_dir=logs) == 0
    assert ended(job) == {0: [0], 1: [-9, 0]}
    said = capfd.readouterr().err
    assert 'rank1.log' in said and 'here' in said.splitlines()


def test_a_log_on_a_disk_that_is_full_costs_no_second_worker(
    job: Job,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that prints a line there dies, and so would each that replaces it."""
    full = os.statvfs_result((4096, 4096, 100, 0, 0, 0, 0, 0, 0, 255))

    def fill(event: WorkerEnded) -> None:
        monkeypatch.setattr(machine.os, 'fstatvfs', lambda descriptor: full)

    job.on(WorkerEnded, fill)
    job.finish_when = lambda: len(job.started(1)) == 2
    assert job.run('1.0=kill', '1.1=print:here', nodes=2, log_dir=tmp_path) == 0
    assert ended(job) == {0: [0], 1: [-9, 0]}
    said = capfd.readouterr().err
    assert 'No space left' in said and 'rank1.log' in said and 'here' in said.splitlines()


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
