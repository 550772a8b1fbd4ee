# SPDX-License-Identifier: Apache-2.0
"""Signals that end a job: those a launcher handles, and the one its workers listen for.

Before the time limit, Slurm and its users send SIGUSR1 or SIGUSR2 as often as SIGTERM. Megatron's
workers handle the signal of `--exit-signal` if `--exit-signal-handler` is given. So on any of these
signals a launcher sends its workers the signal of `--exit-signal`.
"""

import signal
from collections.abc import Callable, Sequence

ASKING = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
"""Signals that end a job, besides the one that the workers listen for."""
_LISTENS = '--exit-signal-handler'
_FLAG = '--exit-signal'


def listened_for(flags: Sequence[str]) -> signal.Signals:
    """The exit signal in a program's flags; SIGTERM by default, and for an invalid name."""
    name = signal.SIGTERM.name
    for number, flag in enumerate(flags):
        if flag == _FLAG:
            name = ''.join(flags[number + 1 : number + 2])
        elif flag.startswith(f'{_FLAG}='):
            name = flag.partition('=')[2]
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
