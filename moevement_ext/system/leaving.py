# SPDX-License-Identifier: Apache-2.0
"""Ends a process that has unstoppable threads, or that must not continue."""

import atexit
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from moevement_ext.errors import UserError
from moevement_ext.system.user_errors import in_one_line

_EVENTS = sys.monitoring.events
# Ids 0 to 2 and 5 have names in Python's documentation.
_TOOL = 4

last_acts: list[Callable[[int], None]] = []
"""Called by `leave` with the exit status, after everything else."""


def leave_in_any_case() -> None:
    """Have `leave` end this process however its program ends, with one line after a `UserError`.

    Python tells no function at the end the exit status, so the end of the outermost frame is
    watched. A forked child ends as usual.
    """
    if sys.monitoring.get_tool(_TOOL) is not None:
        return
    outermost = sys._current_frames()[threading.main_thread().ident or 0]
    while outermost.f_back is not None:
        outermost = outermost.f_back
    process = os.getpid()

    def frame_ends(code: object, offset: int, given: object) -> None:
        # Not any frame without a caller: those of greenlets end earlier.
        if sys._getframe(1) is not outermost or os.getpid() != process:
            return
        if not isinstance(given, KeyboardInterrupt):  # Python ends by SIGINT then
            leave(_status_of(given) if isinstance(given, BaseException) else 0)

    sys.monitoring.use_tool_id(_TOOL, __name__)
    for event in (_EVENTS.PY_RETURN, _EVENTS.PY_UNWIND):
        sys.monitoring.register_callback(_TOOL, event, frame_ends)
    sys.monitoring.set_local_events(_TOOL, outermost.f_code, _EVENTS.PY_RETURN)
    sys.monitoring.set_events(_TOOL, _EVENTS.PY_UNWIND)


def _status_of(error: BaseException) -> int:
    """Print an uncaught exception; its exit status."""
    if isinstance(error, UserError):
        try:
            with in_one_line():
                raise error
        except SystemExit as ending:
            error = ending
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    if isinstance(error.code, int | None):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


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
    while last_acts:
        last_acts.pop()(code)
    end_at_once(code)


def end_at_once(code: int) -> NoReturn:
    """End the process at once, from any thread, after trying to flush its output."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # full disk, dead reader, closed stream
            stream.flush()
    os._exit(code)
