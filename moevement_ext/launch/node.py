# SPDX-License-Identifier: Apache-2.0
"""One host of the allocation, as the supervisor sees it."""

import time
from collections.abc import Callable

import msgspec

from moevement_ext.launch.link import Link
from moevement_ext.launch.loop import FdLoop
from moevement_ext.launch.messages import SILENT_S, FromAgent
from moevement_ext.launch.steps import Step

_TO_CONNECT_S = 120.0
_FIRST_PAUSE_S = 30.0
_LAST_PAUSE_S = 3600.0


class Node:
    """Its step, the connection to its agent, and which of the job's nodes it is.

    Args:
        host: name in the allocation.
        loop: calls when the agent says something.
        on_message: called with what the agent says.
        on_lost: called when the agent is lost, with what is known of the reason.
        on_missed: called when none came, with what is known of the reason.

    Attributes:
        link: to its agent, if there is one.
        seat: the node of the job that it is (torchrun's group rank); None: a spare.
        is_hot: it was told to have hot spares.
        tried: when a step was last started here, in seconds of the monotonic clock.
        why: it has no agent.
        worn: something is wrong with a device of it, which can be used all the same.
        broken: what is wrong with a device that can not, or why it was given up; for the rest of
            the job, since nothing tells that it was repaired.
    """

    def __init__(
        self,
        host: str,
        loop: FdLoop,
        on_message: Callable[['Node', FromAgent], None],
        on_lost: Callable[['Node', str], None],
        on_missed: Callable[['Node', str], None],
    ) -> None:
        self.host = host
        self.link: Link[FromAgent] | None = None
        self.seat: int | None = None
        self.is_hot = False
        self.tried = 0.0
        self.why = 'not started yet'
        self.worn = False
        self.broken = ''
        self._loop = loop
        self._step: Step | None = None
        self._left: list[Step] = []
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_missed = on_missed
        self._pause_s = _FIRST_PAUSE_S

    @property
    def is_spare(self) -> bool:
        """Its agent waits for work, and it can do some."""
        return self.link is not None and self.seat is None and not self.broken

    @property
    def is_coming(self) -> bool:
        """It was asked for an agent, which may connect any moment."""
        return self.link is None and self._step is not None

    @property
    def is_due(self) -> bool:
        """It has no agent, and it is time to ask for one again: perhaps it is repaired."""
        waits = self.link is None and self._step is None and not self.broken
        return waits and time.monotonic() >= self.tried + self._pause_s

    def begin(self, step: Step) -> None:
        """A step was started here, in which an agent is to run."""
        self.tried = step.since
        self._step = step

    def cannot_begin(self, why: str) -> None:
        """It is tried again, later each time."""
        self.tried = time.monotonic()
        self._miss(why)

    def connected(self, link: Link[FromAgent]) -> None:
        """Its agent is there."""
        self.link = link
        self.is_hot = False
        self._pause_s = _FIRST_PAUSE_S
        self._loop.watch(link.fd, self.hear)

    def look(self) -> None:
        """See whether agent and step give signs of life."""
        self._left = [step for step in self._left if step.ended() is None]
        if self.link is not None and self.link.silent_s > SILENT_S:
            self.lose(f'nothing was heard of it for {SILENT_S:.0f} s')
        if self.is_coming:
            self._look_at_step()

    def send(self, message: msgspec.Struct) -> None:
        """Tell the agent, if there is one."""
        if self.link is not None:
            link = self.link
            self._attempt(lambda: link.send(message))

    def hear(self) -> None:
        """Wait for a message of the agent, and act on it."""
        if self.link is not None:
            self._attempt(self._receive)

    def lose(self, why: str) -> None:
        """Give the agent up."""
        self.why = why
        self.disconnect()
        self._abandon_step()
        self._on_lost(self, why)
        self.seat = None

    def give_up(self, why: str) -> None:
        """Lose it for the rest of the job."""
        self.broken = why
        self.lose(why)

    def disconnect(self) -> None:
        """End the agent."""
        if self.link is not None:
            self._loop.forget(self.link.fd)
            self.link.close()
            self.link = None

    def close(self, timeout_s: float) -> None:
        """Wait for the end of the step, at most so long; the agent is gone."""
        if self._step is not None:
            self._step.close(timeout_s)
        for step in self._left:
            step.close(0.0)

    def _receive(self) -> None:
        assert self.link is not None
        self._on_message(self, self.link.receive())

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            self.lose(f'the connection to its agent is lost ({error})')

    def _look_at_step(self) -> None:
        assert self._step is not None
        status = self._step.ended()
        if status is not None:
            why = f'its step ended with status {status} before its agent came'
        elif time.monotonic() > self._step.since + _TO_CONNECT_S:
            why = f'its agent did not come within {_TO_CONNECT_S:.0f} s'
        else:
            return
        self._abandon_step()
        self._miss(why)

    def _miss(self, why: str) -> None:
        self.why = why
        self._on_missed(self, why)
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)

    def _abandon_step(self) -> None:
        """That of a lost node ends when Slurm has noticed: nobody waits for it."""
        if self._step is not None:
            self._step.cancel()
            self._left.append(self._step)
            self._step = None
