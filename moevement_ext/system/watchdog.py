# SPDX-License-Identifier: Apache-2.0
"""Kills this process when it hangs.

A process that is stopped, or whose Python threads all hang, cannot end itself, and a launcher
starts another one only once it is dead. So a small child process listens for its heartbeats. A
process that merely waits, or whose training thread alone is stuck, still sends heartbeats.
"""

import math
import os
import subprocess
import sys
import threading
from pathlib import Path

from moevement_ext.logger import logger_of

logger = logger_of(__name__)

_PROGRAM = Path(__file__).with_name('watchdog_process.py')
_HEARTBEAT_S = 0.5
# The watchdog of this process during set-up.
_of_set_up: 'list[Watchdog]' = []


def under_torchrun() -> bool:
    """True if torchrun launched this process, not one of this package's launchers."""
    return 'TORCHELASTIC_RUN_ID' in os.environ


def is_launched() -> bool:
    """True if a launcher starts another process once this one is dead."""
    return 'TORCHELASTIC_RESTART_COUNT' in os.environ


def watch_set_up(silent_s: float, blocked_s: float) -> None:
    """Watch this process until `set_up_is_over` or the next call, if launched. Main thread."""
    set_up_is_over()
    if is_launched():
        _of_set_up.append(Watchdog(silent_s, None, blocked_s=blocked_s))


def set_up_is_over() -> None:
    """Stop the watchdog of the set-up; the caller starts that of training. Main thread."""
    while _of_set_up:
        _of_set_up.pop().close()


class Watchdog:
    """A child process that watches this one until closed, and never outlives it.

    It kills this process after `silent_s` without a heartbeat, and after `blocked_s` (0: never) in
    which it was blocked in the kernel. `kept_in` is the directory of the run on this node, where it
    records the death of this process (None: not recorded); with `says` it also prints that the
    windows there stay.
    """

    def __init__(
        self, silent_s: float, kept_in: Path | None, says: bool = False, blocked_s: float = 0.0
    ) -> None:
        self._stopping = threading.Event()
        self._dog: subprocess.Popen[bytes] | None = None
        rank = os.environ.get('RANK', '?')
        command = [sys.executable, '-I', '-S', str(_PROGRAM)]
        command += [str(os.getpid()), str(silent_s), str(blocked_s or math.inf), rank]
        command += [] if kept_in is None else [str(kept_in), str(int(says))]
        try:
            self._dog = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:  # must not fail training (invariant I6)
            logger.warning('no watchdog if this process hangs: %s', error)
            return
        threading.Thread(
            target=self._send_heartbeats, name='sparse-ckpt-alive', daemon=True
        ).start()

    def close(self) -> None:
        """Stop watching, as this process cannot hang any more or has another watchdog."""
        self._stopping.set()
        if self._dog is not None:
            self._dog.kill()
            self._dog.wait()

    def _send_heartbeats(self) -> None:
        assert self._dog is not None and self._dog.stdin is not None
        pipe = self._dog.stdin.fileno()
        try:
            while not self._stopping.wait(_HEARTBEAT_S):
                os.write(pipe, b'.')
        except OSError as error:
            if not self._stopping.is_set():
                logger.warning('no watchdog if this process hangs: %s', error)
