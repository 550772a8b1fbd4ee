# SPDX-License-Identifier: Apache-2.0
"""Kills its parent process when the parent sends no heartbeat for too long.

    watchdog_process.py <process id> <seconds> <blocked seconds> <rank> [<directory> <say>]

Heartbeats are bytes on stdin. The watchdog runs as a file, without any package, and ends with the
watched process. It records the death of that process in the directory of the run, for the next
start of the job (see `memory/node_store.py`). With `say` 1 it also prints that the windows there,
if any, stay, as a process that is terminated in the middle of a step cannot do this itself.

While the main thread is blocked in the kernel, as in a page fault of a mapped file, no thread can
send heartbeats. That counts as silence only after so many blocked seconds.
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
NOTHING, SIGN, DEATH, BLOCKED = 'nothing', 'sign', 'death', 'blocked'


def main() -> None:
    """Watch the parent; returns when it is dead."""
    pid, silent_s, blocked_s, rank = int(sys.argv[1]), *map(float, sys.argv[2:4]), sys.argv[4]
    directory = sys.argv[5] if len(sys.argv) > 5 else ''
    says = sys.argv[6:] == ['1']
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    if os.getppid() != pid:  # the parent is dead already; its pid may be reused
        return
    if not falls_silent(silent_s, blocked_s, observations(process, pid, heartbeats=0)):
        _note_death(pid, rank, directory, says)
        return
    signal.pidfd_send_signal(process, signal.SIGKILL)  # first, as printing may fail or block
    _print(f'rank {rank} (pid {pid}) has sent no heartbeat for {silent_s:g} s: killed')
    _note_death(pid, rank, directory, says)


def observations(process: int, pid: int, heartbeats: int) -> Iterator[str]:
    """Yield observations of a process, at most `_POLL_S` each; takes its pidfd and stdin's fd."""
    poll = select.poll()
    for fd in (process, heartbeats):
        poll.register(fd, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll(_POLL_S * 1000)]
        if process in ready:
            yield DEATH
        elif not ready:
            yield BLOCKED if _is_blocked(pid) else NOTHING
        elif os.read(heartbeats, 1 << 16):
            yield SIGN
        else:  # closed, perhaps by a death that the pidfd does not show yet
            poll.unregister(heartbeats)


def falls_silent(silent_s: float, blocked_s: float, observations: Iterator[str]) -> bool:
    """True once the process has sent no heartbeat for `silent_s`; False once it is dead.

    Looks that find it blocked do not count before `blocked_s`.
    """
    nothing = blocked = 0
    while nothing * _POLL_S < silent_s:
        # Counts observations, not clock time: the whole machine may have been suspended.
        seen = next(observations)
        if seen == DEATH:
            return False
        blocked = blocked + 1 if seen == BLOCKED else 0
        excused = seen == BLOCKED and blocked * _POLL_S < blocked_s
        nothing = 0 if excused or seen == SIGN else nothing + 1
    return True


def _is_blocked(pid: int) -> bool:
    """True if the main thread waits in the kernel, not for a core dump."""
    with contextlib.suppress(OSError), open(f'/proc/{pid}/status') as file:
        status = file.read()
        return 'State:\tD' in status and 'CoreDumping:\t1' not in status
    return False


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
        _print(
            f'this run was cut off; windows of this run stay in {directory}: it goes on from them '
            'when torchrun starts it again, or when the same job is launched again'
        )


def _print(what: str) -> None:
    with contextlib.suppress(OSError):  # a full disk, or a dead reader
        sys.stderr.write(f'sparse checkpointing: {what}\n')
        sys.stderr.flush()


if __name__ == '__main__':
    main()
