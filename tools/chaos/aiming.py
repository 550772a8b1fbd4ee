# SPDX-License-Identifier: Apache-2.0
"""Stops a worker in a chosen phase of a recovery, so that a fault can hit it there.

Some phases last a millisecond at toy size. There the worker advances in small steps from the
previous phase, and its events are read after each step.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from moevement_ext.events import Event, NextTier, Recovered, RecoveryPhase
from tools.chaos.landing import Phase
from tools.lab.following import Follower

_POLL_S = 0.002
_STEP_S = 0.0003
_LONGEST_STEPPING_S = 2.5  # well below the hang timeout
_TIMEOUT_S = 150.0
_HURRY = -10
# For phases too short to be seen in time: the previous phase.
_SHORT = {Phase.POST_STEP: Phase.REGROUP, Phase.FETCH: Phase.REGROUP}


class Aim:
    """Aims at one phase of the recovery from the next fault; create it before that fault.

    Args:
        folder: folder of the events.
        phase: phase to hit.
        suitable: returns True if a rank may be caught.
    """

    def __init__(self, folder: Path, phase: Phase, suitable: Callable[[int], bool]) -> None:
        self._tail = Follower(folder)
        self._tail.look()
        self._phase = phase
        self._suitable = suitable
        self._noticed = False
        self._newest: dict[int, str] = {}
        self._pending: list[Event] = []

    def catch(self, running: Callable[[], bool]) -> RecoveryPhase | None:
        """Wait for a worker in the phase, and stop it; returns the worker's event.

        None if the recovery ends first, or has no phases.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        with _in_a_hurry():
            while time.monotonic() < deadline and running():
                self._look()
                while self._pending:
                    event = self._pending.pop(0)
                    if self._hopeless(event):
                        return None
                    if isinstance(event, RecoveryPhase) and self._caught(event):
                        return event
                time.sleep(_POLL_S)
        return None

    def _look(self) -> None:
        for event in self._tail.look():
            self._pending.append(event)
            if isinstance(event, RecoveryPhase):
                self._newest[event.pid] = event.phase

    def _hopeless(self, event: Event) -> bool:
        phase = event.phase if isinstance(event, RecoveryPhase) else None
        self._noticed = self._noticed or phase == Phase.DETECT
        if isinstance(event, Recovered):
            return not event.localized
        return (self._noticed and phase == 'over') or isinstance(event, NextTier)

    def _caught(self, event: RecoveryPhase) -> bool:
        if not self._noticed or not self._suitable(event.rank):
            return False
        if event.phase == self._phase:
            return _signal(event.pid, signal.SIGSTOP)
        if event.phase == _SHORT.get(self._phase) == self._newest[event.pid]:
            return self._step(event.pid)
        return False

    def _step(self, pid: int) -> bool:
        """Advance a process in small steps until it reports its next phase."""
        before = self._newest[pid]
        deadline = time.monotonic() + _LONGEST_STEPPING_S
        while time.monotonic() < deadline and _signal(pid, signal.SIGSTOP):
            self._look()
            if self._newest[pid] == self._phase:
                return True
            _signal(pid, signal.SIGCONT)
            if self._newest[pid] != before:
                return False
            time.sleep(_STEP_S)
        return False


@contextlib.contextmanager
def _in_a_hurry() -> Iterator[None]:
    """Give this thread priority over the workers, where the system allows it."""
    thread = threading.get_native_id()
    usual = os.getpriority(os.PRIO_PROCESS, thread)
    try:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, thread, _HURRY)
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, thread, usual)


def _signal(pid: int, number: signal.Signals) -> bool:
    """Send a signal; False if the process no longer exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
