# SPDX-License-Identifier: Apache-2.0
"""A process that outlives its launcher; a digest file that is refused before training."""

import logging
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch.distributed import DistBackendError, DistNetworkError, HashStore

from moevement_ext.config import ConfigurationError
from moevement_ext.job import ending
from moevement_ext.job.digest_file import refuse_unwritable


@pytest.mark.parametrize('lost', ['launcher_store', 'write_finished'])
def test_end_is_announced_to_no_launcher(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a finished job would fail, and leave its windows behind."""
    asked: list[str] = []

    def gone(*given: object) -> NoReturn:
        asked.append(lost)
        raise DistNetworkError('connection refused')

    monkeypatch.setattr(ending, 'launcher_store', lambda timeout: object())
    monkeypatch.setattr(ending, lost, gone)
    ending.announce(1, 0)
    assert asked == [lost]


RANK: Any = SimpleNamespace(number=0, world_size=2)


def test_process_that_ended_unseen_is_not_waited_for_forever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No launcher tells of a process that died after training, or that calls `os._exit`."""
    monkeypatch.setattr(ending, 'launcher_store', lambda timeout: HashStore())
    monkeypatch.setattr(ending, '_LONGEST_END', timedelta(seconds=0.1))
    closed: list[bool] = []
    with caplog.at_level(logging.WARNING):
        ending.end(RANK, ending.LastBarrier(RANK), 0, True, closed.append, 0)
    assert not closed and 'windows stay: other ranks have not ended for 0:00:00.1' in caplog.text


@pytest.mark.parametrize('error', [DistBackendError('NCCL'), DistNetworkError('no store')])
def test_lost_peer_is_no_lost_store(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank starts again, and would wait in vain for processes that have ended."""

    def fails() -> NoReturn:
        raise error

    monkeypatch.setattr(ending, 'launcher_store', lambda timeout: HashStore())
    monkeypatch.setattr(torch.distributed, 'barrier', fails)
    if isinstance(error, DistNetworkError):
        assert ending.trained_together(RANK, None) is None
        return
    with pytest.raises(DistBackendError, match='NCCL'):
        ending.trained_together(RANK, None)


def test_check_leaves_a_writable_file_unchanged(tmp_path: Path) -> None:
    earlier, new = tmp_path / 'earlier.json', tmp_path / 'runs' / 'new.json'
    earlier.write_text('{}')
    partial = tmp_path / 'earlier.json.partial'  # another job is writing it
    partial.touch()
    refuse_unwritable(str(earlier))
    refuse_unwritable(str(new))
    assert earlier.read_text() == '{}'
    assert sorted(path.name for path in tmp_path.iterdir()) == [earlier.name, partial.name]


@pytest.mark.parametrize('place', ['.', 'file/digest.json', '../' + 300 * 'long'])
def test_unwritable_file_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / 'file').touch()
    with pytest.raises(ConfigurationError, match='--sparse-ckpt-digest .*: digests cannot be writ'):
        refuse_unwritable(str(tmp_path / place))
