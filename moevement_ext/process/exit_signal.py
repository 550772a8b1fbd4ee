# SPDX-License-Identifier: Apache-2.0
"""Which signal asks a launcher to end its job, and at which one its workers save and end.

Slurm and its users send SIGUSR1 or SIGUSR2 before the time is up, as often as SIGTERM. What the
workers of Megatron listen for is another matter: `--exit-signal`, with `--exit-signal-handler`. So
whatever a launcher is asked with, it hands on the latter.
"""

import signal
from collections.abc import Callable, Sequence

ASKING = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
"""Each of them ends a job; what the workers listen for does as well."""
_LISTENS = '--exit-signal-handler'
_FLAG = '--exit-signal'


def listened_for(flags: Sequence[str]) -> signal.Signals:
    """What the workers of a program with these flags expect; SIGTERM if they say nothing.

    A name that is none is for the program to refuse.
    """
    name = signal.SIGTERM.name
    for number, flag in enumerate(flags):
        if flag == _FLAG:
            name = ''.join(flags[number + 1 : number + 2])
        elif flag.startswith(f'{_FLAG}='):
            name = flag.partition('=')[2]
    known = name in signal.Signals.__members__ and _LISTENS in flags
    return signal.Signals[name] if known else signal.SIGTERM


def stop_at_signals(stop: Callable[[int], None], flags: Sequence[str]) -> None:
    """Let a launcher end its workers when it is asked to, or its terminal is gone.

    Args:
        stop: called with the exit status.
        flags: of the program.
    """
    for number in {*ASKING, listened_for(flags)}:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # it was started with nohup
        signal.signal(number, lambda received, _: stop(128 + received))
