# SPDX-License-Identifier: Apache-2.0
"""Runs a command that Linux kills when the command's parent process dies.

    bound.py <parent pid> <command ...>

The launcher starts all its processes through this program, so that none outlives the launcher, even
if the launcher is killed. This program runs as a file, without the package, and replaces itself
with the command by exec, which keeps the process id and the parent-death signal. (`preexec_fn`
could do the same in the fork, but Python advises against it in a process with threads, such as
those of the launcher's store.)
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), 'prctl(PR_SET_PDEATHSIG) failed')
    if os.getppid() != int(parent):
        sys.exit('the launcher died before its worker started')
    os.execv(command[0], command)


if __name__ == '__main__':
    main()
