# SPDX-License-Identifier: Apache-2.0
r"""Shows the state of a running job, from its events (`--sparse-ckpt-events`), and refreshes it.

    python -m tools.status runs/events
    python -m tools.status runs/events --once

Iteration and pace, age of the newest safe window, activity of each stage's ranks, silent ranks, the
last failures and their recoveries. The tool ends with the job, or by Ctrl-C. The folder may be on a
file system shared with the nodes; the tool does not contact the job itself.

Exit status: 0 done, 2 there are no events to read.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from tools.lab.arguments import Parser
from tools.lab.errors import LabError
from tools.lab.following import Follower
from tools.lab.history import History, read_history
from tools.status.screen import show


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog='python -m tools.status', description=__doc__)
    parser.add_argument('events', type=Path, help='folder of --sparse-ckpt-events')
    parser.add_argument('--once', action='store_true', help='print the present state and exit')
    parser.add_argument(
        '--every', type=_seconds, default=2.0, metavar='S', help='seconds (default: %(default)s)'
    )
    args = parser.parse_args(argv)
    console = Console()
    try:
        if args.once:
            console.print(show(read_history(args.events), time.time()))
        else:
            with contextlib.suppress(KeyboardInterrupt):
                _follow(Follower(args.events), args.every, console)
    except LabError as error:
        print(f'status: {error}', file=sys.stderr)
        return 2
    return 0


def _follow(follower: Follower, every_s: float, console: Console) -> None:
    """Refresh the screen until all ranks have finished."""
    history: History | None = None
    with Live('no events yet', console=console, auto_refresh=False) as live:
        while history is None or not history.finished:
            if follower.look():
                history = History(follower.events)
            if history is not None:
                live.update(show(history, time.time()), refresh=True)
            if history is None or not history.finished:
                time.sleep(every_s)


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f'{text}: give a number above 0')
    return value


if __name__ == '__main__':
    sys.exit(main())
