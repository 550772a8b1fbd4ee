# SPDX-License-Identifier: Apache-2.0
"""Kills the process that has started it when that gives no sign of life for too long.

    watchdog_process.py <process id> <seconds> <rank> [<directory>]

Signs of life are bytes on stdin. It runs as a file, without any package, and ends with the process
that it watches. When that dies, it says that the windows in the directory are still there: the
process itself, terminated in the middle of a step, cannot.
"""

import contextlib
import os
import select
import signal
import sys

_LOOK_S = 0.5


def main() -> None:
    """Returns when the process is dead."""
    pid, silent_s, rank = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    directory = sys.argv[4] if len(sys.argv) > 4 else ''
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    if os.getppid() != pid:  # it died before, and the number may be another's
        return
    looks, signs = 0, [0]
    while looks * _LOOK_S < silent_s:
        # Counted in looks, not by a clock: the whole machine may have stood still in between.
        ready = select.select([*signs, process], [], [], _LOOK_S)[0]
        if process in ready:
            _say_what_stays(pid, rank, directory)
            return
        if not ready:
            looks += 1
        elif os.read(0, 1 << 16):
            looks = 0
        else:  # closed: by a death, say, of which only this is to be seen yet
            signs.clear()
    signal.pidfd_send_signal(process, signal.SIGKILL)  # first: saying so may fail, or wait
    _say(f'rank {rank} (pid {pid}) has given no sign of life for {silent_s:g} s: killed')
    _say_what_stays(pid, rank, directory)


def _say_what_stays(pid: int, rank: str, directory: str) -> None:
    if directory and os.path.isdir(directory):
        _say(
            f'rank {rank} (pid {pid}) is dead; windows of this run stay in {directory}: the same '
            'job, launched again, goes on from them'
        )


def _say(what: str) -> None:
    with contextlib.suppress(OSError):  # a full disk, or a reader that is gone
        sys.stderr.write(f'sparse checkpointing: {what}\n')
        sys.stderr.flush()


if __name__ == '__main__':
    main()
