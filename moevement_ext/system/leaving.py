# SPDX-License-Identifier: Apache-2.0
"""Ends of processes: signals that end a job, exits in any state, and mistakes of the user.

Before the time limit, Slurm and its users send SIGUSR1 or SIGUSR2 as often as SIGTERM. Megatron's
workers handle the signal of `--exit-signal` if `--exit-signal-handler` is given. So on any of these
signals a launcher sends its workers the signal of `--exit-signal`.
"""

import argparse
import atexit
import difflib
import multiprocessing.util
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from moevement_ext.config_file import last_value
from moevement_ext.errors import EXIT_USER_ERROR, UserError

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


ASKING = (*(signal.SIGINT, signal.SIGTERM, signal.SIGHUP), *(signal.SIGUSR1, signal.SIGUSR2))
"""Signals that end a job, besides the one that the workers listen for."""
_LISTENS = '--exit-signal-handler'
_FLAG = '--exit-signal'


def listened_for(flags: Sequence[str]) -> signal.Signals:
    """The exit signal in a program's flags; SIGTERM by default, and for an invalid name."""
    name = last_value(flags, _FLAG) or ''
    known = name in signal.Signals.__members__ and _LISTENS in flags
    return signal.Signals[name] if known else signal.SIGTERM


def stop_at_signals(stop: Callable[[int], None], flags: Sequence[str]) -> None:
    """Install handlers that end the workers at an exit signal or the loss of the terminal.

    `stop` is called with the exit status; `flags` is the program's command line.
    """
    for number in {*ASKING, listened_for(flags)}:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # the launcher was started with nohup
        signal.signal(number, lambda received, _: stop(128 + received))


_UNKNOWN = 'unrecognized arguments: '
# Similarity, from 0 to 1, at which a known flag is suggested for an unknown one.
_NEAR = 0.8


@contextmanager
def in_one_line() -> Iterator[None]:
    """Turn a `UserError` in the context into one line on stderr, in the style of argparse.

    Raises `SystemExit` with `EXIT_USER_ERROR` instead.
    """
    try:
        yield
    except UserError as error:
        print(f'{_program()}: error: {error}', file=sys.stderr, flush=True)
        sys.exit(EXIT_USER_ERROR)


def _program() -> str:
    spec = getattr(sys.modules['__main__'], '__spec__', None)
    if spec is not None:  # started by -m
        return f'python -m {spec.name.removesuffix(".__main__")}'
    return Path(sys.argv[0]).name


class Parser(argparse.ArgumentParser):
    """Prints help without reformatting, and errors without the usage text."""

    def __init__(self, prog: str, **others: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, **{'formatter_class': formatter, **others})

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER_ERROR, usage_error(self, message))


def usage_error(parser: argparse.ArgumentParser, message: str) -> str:
    """Format an error of a command line in one line, instead of the usage of all flags.

    For an unknown flag, the most similar known flag is added.
    """
    hint = ''
    if message.startswith(_UNKNOWN):
        known = [flag for action in parser._actions for flag in action.option_strings]
        given = message.removeprefix(_UNKNOWN).split()
        flags = [word.partition('=')[0] for word in given if word.startswith('--')]
        near = [near for flag in flags for near in difflib.get_close_matches(flag, known, 1, _NEAR)]
        hint = f'; did you mean {" ".join(near)}?' if near else ''
    return f'{parser.prog}: error: {message}{hint} ({parser.prog} --help: all flags)\n'
