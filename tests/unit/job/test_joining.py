# SPDX-License-Identifier: Apache-2.0
"""Orphans of a rank belong to the run, in any layout."""

from datetime import timedelta
from pathlib import Path

import pytest

from moevement_ext.config import OFF, RESTART, SparseCheckpointConfig
from moevement_ext.job import joining
from moevement_ext.memory.window.name import RankIdentity


class Enough(Exception):
    """Raised to end the set-up."""


@pytest.mark.parametrize(('elastic', 'run'), [(OFF, 'run.0123abcd'), (RESTART, 'run')])
def test_orphans_of_another_layout_are_ended(
    elastic: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense checkpoint writers use several hundred MB each."""
    asked: list[Path] = []

    def watch_set_up(silent_s: float) -> None:
        raise Enough

    monkeypatch.setattr(joining, 'end_orphans', asked.append)
    monkeypatch.setattr(joining, 'isolate_children', lambda: None)
    monkeypatch.setattr(joining, 'watch_set_up', watch_set_up)
    config = SparseCheckpointConfig(dir='/dev/shm', elastic=elastic)
    with pytest.raises(Enough):
        joining._meet(
            RankIdentity('a', 'b', 0), 1, 'run.0123abcd', config, timedelta(seconds=1), None
        )
    assert asked == [Path('/dev/shm') / run]
