# SPDX-License-Identifier: Apache-2.0
"""Ends a process that has unstoppable threads, or that must not continue."""

import atexit
import multiprocessing.util
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End a finished process without finalizing the interpreter.

    Some threads cannot be stopped: inside torch they wait for the launcher's store to report
    the end of a round, or for a dead peer. If such a thread returns during finalization,
    CPython (before 3.14) ends it by `pthread_exit`, which C++ turns into SIGABRT: "terminate
    called without an active exception".
    """
    # The steps of the interpreter before it drops its threads (checked against Python 3.12).
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # In a `multiprocessing` child the caller would do this, but control never returns to it.
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    end_at_once(code)


def end_at_once(code: int) -> NoReturn:
    """End the process at once, from any thread, after trying to flush its output."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # full disk, dead reader, closed stream
            stream.flush()
    os._exit(code)
