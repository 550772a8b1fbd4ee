# SPDX-License-Identifier: Apache-2.0
"""Agents that arrive at the supervisor although it has one of their host, or wants none."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from moevement_ext.events import Event
from moevement_ext.launch import messages
from moevement_ext.launch.hosts import SlurmStarter
from moevement_ext.launch.launcher_events import NodeLost, NodeReady
from moevement_ext.launch.node import Node


class Arrivals:
    """A supervisor with the host `a` only; its agents arrive one by one."""

    def __init__(self) -> None:
        self.reported: list[Event] = []
        loop, config = MagicMock(), MagicMock(nodes=1)
        self.starter: Any = SlurmStarter(['a'], MagicMock(), config, loop, self.reported.append)

    def arrive(self, host: str) -> MagicMock:
        link = MagicMock()
        arrived = [(messages.Here(host), link)]
        self.starter._listener = SimpleNamespace(take=lambda: arrived)
        self.starter._arrivals()
        return link


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arrivals]:
    monkeypatch.setattr(messages, 'program', lambda *given: 'the program')
    monkeypatch.setattr('moevement_ext.launch.hosts.default_variables', lambda config: {})
    yield Arrivals()


def test_new_agent_of_a_host_ends_the_earlier_one(arrivals: Arrivals) -> None:
    """Else workers of the earlier agent would live on beside the new ones."""
    before, after = arrivals.arrive('a'), arrivals.arrive('a')
    before.close.assert_called_once()
    after.close.assert_not_called()
    assert [type(event) for event in arrivals.reported] == [NodeReady, NodeLost, NodeReady]


def test_agent_of_an_unknown_host_is_turned_away(arrivals: Arrivals) -> None:
    stranger = arrivals.arrive('b')
    stranger.close.assert_called_once()
    stranger.send.assert_not_called()
    assert arrivals.reported == []


@pytest.mark.parametrize(('minutes', 'missed'), [(10, 0), (16, 1)])
def test_agent_may_come_after_the_import_of_a_large_image(minutes: int, missed: int) -> None:
    """Reports name up to seven minutes for 20 GB; cancelled, the import would begin anew."""
    on_missed, step = MagicMock(), MagicMock(since=time.monotonic() - 60 * minutes)
    step.ended.return_value = None
    node = Node('a', MagicMock(), MagicMock(), MagicMock(), on_missed)
    node.begin(step)
    node.look()
    assert (on_missed.call_count, step.cancel.call_count) == (missed, missed)
    assert not missed or 'within 15 minutes' in node.why
