# SPDX-License-Identifier: Apache-2.0
"""Kills its parent process when the parent sends no heartbeat for too long.

    watchdog_process.py <process id> <seconds> <rank> [<directory> <say>]

Heartbeats are bytes on stdin. The watchdog runs as a file, without any package, and ends with the
watched process. It records the death of that process in the directory of the run, for the next
start of the job (see `memory/node_store.py`). With `say` 1 it also prints that the windows there,
if any, stay, as a process that is terminated in the middle of a step cannot do this itself.
"""

import contextlib
import glob
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator

_POLL_S = 0.5
NOTHING, SIGN, DEATH = 'nothing', 'sign', 'death'


def main() -> None:
    """Watch the parent; returns when it is dead."""
    pid, silent_s, rank = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    directory = sys.argv[4] if len(sys.argv) > 4 else ''
    says = sys.argv[5:] == ['1']
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    if os.getppid() != pid:  # the parent is dead already; its pid may be reused
        return
    if not falls_silent(silent_s, observations(process, heartbeats=0)):
        _note_death(pid, rank, directory, says)
        return
    signal.pidfd_send_signal(process, signal.SIGKILL)  # first, as printing may fail or block
    _say(f'rank {rank} (pid {pid}) has sent no heartbeat for {silent_s:g} s: killed')
    _note_death(pid, rank, directory, says)


def observations(process: int, heartbeats: int) -> Iterator[str]:
    """Yield observations of a process, at most `_POLL_S` each; takes its pidfd and stdin's fd."""
    poll = select.poll()
    for fd in (process, heartbeats):
        poll.register(fd, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll(_POLL_S * 1000)]
        if process in ready:
            yield DEATH
        elif not ready:
            yield NOTHING
        elif os.read(heartbeats, 1 << 16):
            yield SIGN
        else:  # closed, perhaps by a death that the pidfd does not show yet
            poll.unregister(heartbeats)


def falls_silent(silent_s: float, observations: Iterator[str]) -> bool:
    """True once the process has sent no heartbeat for `silent_s`; False once it is dead."""
    nothing = 0
    while nothing * _POLL_S < silent_s:
        # Counts observations, not clock time: the whole machine may have been suspended.
        seen = next(observations)
        if seen == DEATH:
            return False
        nothing = nothing + 1 if seen == NOTHING else 0
    return True


def _note_death(pid: int, rank: str, directory: str, says: bool) -> None:
    if not (rank.isdigit() and directory and os.path.isdir(directory)):
        return
    line = json.dumps({'time': time.time(), 'rank': int(rank), 'pid': pid}) + '\n'
    shared = os.path.join(directory, 'shared')
    with contextlib.suppress(OSError):
        os.makedirs(shared, mode=0o700, exist_ok=True)
        path = os.path.join(shared, 'deaths.jsonl')
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
    windows = os.path.join(glob.escape(directory), '*', '*', 'window-*.window')
    if says and glob.glob(windows):  # one rank prints this, not necessarily the first to die
        _say(
            f'this run was cut off; windows of this run stay in {directory}: it goes on from them '
            'when torchrun starts it again, or when the same job is launched again'
        )


def _say(what: str) -> None:
    with contextlib.suppress(OSError):  # a full disk, or a dead reader
        sys.stderr.write(f'sparse checkpointing: {what}\n')
        sys.stderr.flush()


if __name__ == '__main__':
    main()
