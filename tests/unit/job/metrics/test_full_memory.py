# SPDX-License-Identifier: Apache-2.0
"""Metrics in a tmpfs that is full before or after the start: real processes in a small mount."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moevement_ext.job.metrics.instruments import INSTRUMENTS
from tests.distributed.conftest import mounted_tmpfs
from tests.unit.job.metrics.test_prometheus import Process, port

__all__ = ['port']
pytestmark = [pytest.mark.timed, pytest.mark.timeout(120)]

TRAINER = """
import sys
from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.events import EventLog, FailureDetected
from moevement_ext.membership.exchange import Exchange
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.job.metrics.observer import observe

config = SparseCheckpointConfig(dir=sys.argv[2], metrics=int(sys.argv[1]))
events = EventLog(None, 0)
rank = Rank(RankIdentity('run', 'layout', 0), 1, 'run', 'gloo', config, events, Exchange())
observer = observe(rank)
events.emit(FailureDetected(reason='rank 2'))
if observer is not None:
    observer.close()
print('trains on')
"""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with mounted_tmpfs(tmp_path / 'small', '2m') as path:
        yield path


def fill(path: Path) -> None:
    with open(path / 'hog', 'wb', buffering=0) as hog, pytest.raises(OSError, match='No space'):
        while True:
            hog.write(bytes(4096))


def test_recording_process_survives_a_full_tmpfs(small: Path, port: int) -> None:
    process = Process(port, small / 'root', 0)
    try:
        fill(small)
        for number, one in enumerate(INSTRUMENTS):
            label = '' if one.label is None else f' value{number}'
            process.record(f'{one.name.removeprefix("moevement_")} 1{label}')
    finally:
        process.process.kill()


def test_training_starts_without_metrics_in_a_full_tmpfs(small: Path, port: int) -> None:
    fill(small)
    done = subprocess.run(
        [sys.executable, '-c', TRAINER, str(port), str(small)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == 'trains on\n'
    assert 'metrics' in done.stderr and 'No space left on device' in done.stderr
    assert 'Traceback' not in done.stderr
    assert not list(small.rglob('*.page')), 'which others would fail to read'
