# SPDX-License-Identifier: Apache-2.0
"""Metrics in a tmpfs that is full, before or after they begin: real processes in a small mount."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moevement_ext.metrics import instruments
from moevement_ext.metrics.instruments import INSTRUMENTS, Instrument
from tests.distributed.conftest import mounted_tmpfs
from tests.unit.metrics.test_prometheus import Process, port

__all__ = ['port']
pytestmark = [pytest.mark.timed, pytest.mark.timeout(120)]

NAMES = {one: name for name, one in vars(instruments).items() if isinstance(one, Instrument)}
TRAINER = """
import sys
from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.events import EventLog, FailureDetected
from moevement_ext.membership.exchange import Exchange
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.metrics.start import observe

config = SparseCheckpointConfig(dir=sys.argv[2], metrics=int(sys.argv[1]))
events = EventLog(None, 0)
rank = Rank(RankIdentity('run', 'layout', 0), 1, 'run', 'gloo', config, events, Exchange())
observer = observe(rank)
events.emit(FailureDetected(reason='rank 2'))
print('trains on, metrics:', observer is not None)
"""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with mounted_tmpfs(tmp_path / 'small', '2m') as path:
        yield path


def fill(path: Path) -> None:
    with open(path / 'hog', 'wb', buffering=0) as hog, pytest.raises(OSError, match='No space'):
        while True:
            hog.write(bytes(4096))


def test_a_tmpfs_that_becomes_full_does_not_end_who_records(small: Path, port: int) -> None:
    process = Process(port, small / 'root', 0)
    try:
        fill(small)
        for number, one in enumerate(INSTRUMENTS):
            label = '' if one.label is None else f' value{number}'
            process.record(f'{NAMES[one]} 1{label}')
    finally:
        process.process.kill()


def test_training_goes_on_without_metrics_for_which_there_is_no_room(
    small: Path, port: int
) -> None:
    fill(small)
    done = subprocess.run(
        [sys.executable, '-c', TRAINER, str(port), str(small)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert 'trains on, metrics: False' in done.stdout
    assert 'no metrics for Prometheus: cannot reserve' in done.stderr
    assert not list(small.rglob('*.db')), 'which others would fail to read'
