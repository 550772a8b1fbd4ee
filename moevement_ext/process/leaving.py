# SPDX-License-Identifier: Apache-2.0
"""How a process ends that has threads which nobody can end, or that must not go on."""

import atexit
import multiprocessing.util
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End the process, all of whose work is done, without taking the interpreter down.

    Some threads cannot be ended: they wait within torch for the launcher's store to say that an
    epoch is broken, or for a peer that died. If one returns while the interpreter is being taken
    down, CPython (before 3.14) ends it by `pthread_exit`, which C++ answers with SIGABRT:
    "terminate called without an active exception".
    """
    # What the interpreter does before it lets go of its threads (checked against Python 3.12).
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # A process that `multiprocessing` has started leaves this to its caller, whom it never meets.
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    end_at_once(code)


def end_at_once(code: int) -> NoReturn:
    """End the process as it is, from any thread; what it has printed gets out if it can."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a full disk; a reader that is gone; closed
            stream.flush()
    os._exit(code)
