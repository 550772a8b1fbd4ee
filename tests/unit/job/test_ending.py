# SPDX-License-Identifier: Apache-2.0
"""A process that ends as planned may outlive its launcher."""

from typing import NoReturn

import pytest
from torch.distributed import DistNetworkError

from moevement_ext.job import ending


@pytest.mark.parametrize('lost', ['launcher_store', 'tell_finished'])
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
