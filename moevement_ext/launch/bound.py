# SPDX-License-Identifier: Apache-2.0
"""Becomes a command that Linux kills when its parent is gone.

    bound.py <parent pid> <command ...>

The launcher starts all its processes through this program, so that none outlives it, even if it is
killed itself. It runs as a file, without the package, and becomes the command by exec, which keeps
both its process id and the wish. (`preexec_fn` could do the same in the fork, but Python advises
against it in a process with threads, such as the launcher's store.)
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Never returns."""
    parent, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), 'prctl(PR_SET_PDEATHSIG) failed')
    if os.getppid() != int(parent):
        sys.exit('the launcher died before its worker started')
    os.execv(command[0], command)


if __name__ == '__main__':
    main()
