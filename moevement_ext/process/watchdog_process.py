# SPDX-License-Identifier: Apache-2.0
"""Kills the process that has started it when that gives no sign of life for too long.

    watchdog_process.py <process id> <seconds> <rank>

Signs of life are bytes on stdin. It runs as a file, without any package, and ends with the process
that it watches.
"""

import os
import select
import signal
import sys

_LOOK_S = 0.5


def main() -> None:
    """Returns when the process is dead."""
    pid, silent_s, rank = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
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
            return
        if not ready:
            looks += 1
        elif os.read(0, 1 << 16):
            looks = 0
        else:  # closed: by a death, say, of which only this is to be seen yet
            signs.clear()
    sys.stderr.write(
        f'sparse checkpointing: rank {rank} (pid {pid}) has given no sign of life for '
        f'{silent_s:g} s: killed\n'
    )
    sys.stderr.flush()
    signal.pidfd_send_signal(process, signal.SIGKILL)


if __name__ == '__main__':
    main()
