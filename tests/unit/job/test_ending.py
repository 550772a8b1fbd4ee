# SPDX-License-Identifier: Apache-2.0
"""A process that ends as planned may outlive its launcher."""

import logging
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch.distributed import DistBackendError, DistNetworkError, HashStore

from moevement_ext.job import ending


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
