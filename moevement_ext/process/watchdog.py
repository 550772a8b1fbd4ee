# SPDX-License-Identifier: Apache-2.0
"""Has this process killed when it hangs, where its launcher would not: under torchrun.

A process that is stopped, or in which no thread of Python runs any more, can do nothing about that
itself; and torchrun starts another only when it is dead. So a small process beside it listens for
its signs of life. Who merely waits, or is stuck in its training thread, gives them.
"""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

logger = logging.getLogger(__name__)

_PROGRAM = Path(__file__).with_name('watchdog_process.py')
_HEARTBEAT_S = 0.5
# The one of this process while it sets up.
_of_set_up: 'list[Watchdog]' = []


def under_torchrun() -> bool:
    """The launcher of this process kills nobody who hangs; those of this package do."""
    return 'TORCHELASTIC_RUN_ID' in os.environ


def watch_set_up(silent_s: float) -> None:
    """Watch this process from now on, if nobody else does, until `set_up_is_over`. Main thread.

    Args:
        silent_s: generous: what is built meanwhile may keep other threads from running.
    """
    if under_torchrun() and not _of_set_up:
        _of_set_up.append(Watchdog(silent_s, None))


def set_up_is_over() -> None:
    """Whoever calls this has it watched more closely. Main thread."""
    while _of_set_up:
        _of_set_up.pop().close()


class Watchdog:
    """The process beside this one, until closed; it does not outlive this one.

    Args:
        silent_s: seconds without a sign of life after which this process is killed.
        kept_in: directory of the run on this node, in which the death of this process is noted;
            None: nowhere.
        says: that the windows there stay is then said, too.
    """

    def __init__(self, silent_s: float, kept_in: Path | None, says: bool = False) -> None:
        self._stopping = threading.Event()
        self._dog: subprocess.Popen[bytes] | None = None
        rank = os.environ.get('RANK', '?')
        command = [sys.executable, '-I', '-S', str(_PROGRAM)]
        command += [str(os.getpid()), str(silent_s), rank]
        command += [] if kept_in is None else [str(kept_in), str(int(says))]
        try:
            self._dog = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:  # never training's matter (invariant I6)
            logger.warning('sparse checkpointing: nobody kills this process if it hangs: %s', error)
            return
        threading.Thread(
            target=self._send_heartbeats, name='sparse-ckpt-alive', daemon=True
        ).start()

    def close(self) -> None:
        """This process has nothing to do any more that could hang; or another one watches it."""
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
                logger.warning(
                    'sparse checkpointing: nobody kills this process if it hangs: %s', error
                )
