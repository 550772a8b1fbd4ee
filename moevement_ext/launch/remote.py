# SPDX-License-Identifier: Apache-2.0
"""A worker on another node, as the supervisor sees it."""

import os
import signal
import time
from typing import Protocol

from moevement_ext.launch.child import Child
from moevement_ext.launch.messages import Signal, Start

_TO_START_S = 300.0
_NOT_AN_END = signal.SIGSTOP, signal.SIGCONT


class Commands(Protocol):
    """How a worker's node is told something."""

    def send(self, message: Signal | Start) -> None:
        """Tell the agent; the workers end if it is lost."""

    def hear(self) -> None:
        """Wait for a message of the agent and act on it; the workers end if it is lost."""

    def give_up(self, why: str) -> None:
        """Nothing is to run there any more; the workers end."""


class RemoteChild(Child):
    """A worker that is, or will be, started by an agent.

    Args:
        order: that starts it.
        restarts: how often its rank was restarted.

    Attributes:
        pid: 0 until its agent has started it.
        node: that it runs on; None while there is none for it.
    """

    def __init__(self, order: Start, restarts: int) -> None:
        super().__init__(0, os.eventfd(0), None)
        self.order = order
        self.restarts = restarts
        self.node: Commands | None = None
        self._code: int | None = None

    @property
    def waits_for_node(self) -> bool:
        """There is no node for it yet."""
        return self.node is None and self._code is None

    @property
    def is_over(self) -> bool:
        """It has ended, or its node was lost."""
        return self._code is not None

    def start_on(self, node: Commands) -> None:
        """Let it be started there."""
        self.node = node
        self._asked_for_at = time.monotonic()
        node.send(self.order)

    @property
    def is_overdue(self) -> bool:
        """Its agent should have started it long ago, but hangs."""
        waits = self.node is not None and self._code is None and not self.pid
        return waits and time.monotonic() > self._asked_for_at + _TO_START_S

    def end(self, code: int) -> None:
        """It is dead; `death` becomes readable."""
        if self._code is None:
            self._code = code
            os.eventfd_write(self.death, 1)

    def dies(self) -> bool:
        """Hear its agent until it is dead; False if it does not die."""
        while self._code is None and self.to_die_s:
            assert self.node is not None
            self.node.hear()
        return self._code is not None

    def _send(self, number: int) -> None:
        if self._code is not None:
            return
        if self.node is not None:
            self.node.send(Signal(self.order.key, number))
        elif number not in _NOT_AN_END:
            self.end(-number)

    def close(self) -> None:
        """It has no pipes."""

    def _how_it_ended(self) -> int:
        while self._code is None:
            assert self.node is not None
            self.node.hear()
        return self._code

    def _reap(self) -> int:
        return self._how_it_ended()
