# SPDX-License-Identifier: Apache-2.0
r"""Shows the state of a running job, from its events (`--sparse-ckpt-events`), and refreshes it.

    moevement status runs/events
    moevement status runs/events --once
    moevement status runs/events --json
    moevement status runs/events --serve 8080

Iteration and pace, age of the newest safe window, activity of each stage's ranks, silent ranks, the
last failures and their recoveries. The tool ends with the job, or by Ctrl-C. The folder may be on a
file system shared with the nodes; the tool does not contact the job itself.

Exit status: 0 done, 2 there are no events to read. With --once and --json: 0 the job is well or has
finished; 1 it recovers, ranks are silent or missing, or the newest safe window is old; 2 it is
dead: no heartbeat for long, or no events.
"""

import argparse
import contextlib
import io
import sys
import time
from collections import Counter
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from moevement_ext.events import WINDOW_EVERY_S, SlowRank

from .lab.activity import Doing
from .lab.figures import print_json
from .lab.following import Follower
from .lab.history import History, Pace, read_history, shares
from .lab.programs import LabError, program
from .lab.tables import clock, duration, loss, table


def main(argv: Sequence[str] | None = None) -> int:
    parser = program('status', __doc__, kinds={'address': _address})
    args = parser.parse_args(argv)
    console = Console()
    try:
        if args.once or args.json:
            history, now = read_history(args.events), time.time()
            if args.json:
                print_json(summary(history, now))
            else:
                console.print(show(history, now))
            return health(history, now)
        with contextlib.suppress(KeyboardInterrupt):
            if args.serve:
                _serve(Follower(args.events), args.every, args.serve)
            else:
                _follow(Follower(args.events), args.every, console)
    except LabError as error:
        print(f'status: {error}', file=sys.stderr)
        return 2
    return 0


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(':')
    if not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f'{text}: give a port, or HOST:PORT')
    return host or '127.0.0.1', int(port)


def _serve(follower: Follower, every_s: float, address: tuple[str, int]) -> None:
    """Answer requests with the screen until Ctrl-C.

    Raises LabError: the folder cannot be read, or the address is taken.
    """
    follower.read_new()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            console = Console(record=True, file=io.StringIO(), width=_PAGE_WIDTH)
            try:
                follower.read_new()
                history = History(follower.events) if follower.events else None
                console.print(show(history, time.time()) if history else 'no events yet')
            except LabError as error:
                console.print(str(error), markup=False)
            page = console.export_html(inline_styles=True).encode()
            self.send_response(200)
            self.send_header('Content-Type', 'text/html; charset=utf-8')
            self.send_header('Content-Length', str(len(page)))
            self.send_header('Refresh', f'{every_s:g}')
            with contextlib.suppress(ConnectionError):  # its reader has gone
                self.end_headers()
                self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            """Requests are not worth a line."""

    try:
        server = HTTPServer(address, Page)
    except OSError as error:
        raise LabError(f'--serve {":".join(map(str, address))}: {error.strerror}') from error
    with server:
        print(f'http://{address[0]}:{server.server_port}', flush=True)
        server.serve_forever()


def _follow(follower: Follower, every_s: float, console: Console) -> None:
    history: History | None = None
    follower.read_new()  # before the screen, if it fails
    with Live('no events yet', console=console, auto_refresh=False) as live:
        while history is None or not history.finished:
            if follower.read_new() or (history is None and follower.events):
                history = History(follower.events)
            if history is not None:
                live.update(show(history, time.time()), refresh=True)
            if history is None or not history.finished:
                time.sleep(every_s)


_RECOVERIES = 5
_HOSTS = 2  # per stage; more do not fit into a line
_RECENT = 5  # number of windows per rank that the present pace averages
_LATE_WINDOWS = 3  # as in the corresponding alert
_DEAD_WINDOWS = 10
_LATE_S, _DEAD_S = 60.0, 600.0  # minimum: other hosts see events some seconds late
_STYLES = 'bold green', 'bold yellow', 'bold red'  # by health
_PAGE_WIDTH = 120
_OF_FAILURE = 'start end scope reasons replaced replayed verified differing phases'.split()
_OF_SLOW = 'slow node ratio iterations'.split()
_BARE: dict[str, Any] = {'title_justify': 'left', 'box': None, 'pad_edge': False}


def show(history: History, now: float) -> Group:
    text, harm = _headline(history, now)
    headline = Text(text, _STYLES[harm])
    parts: list[Text | Table] = [headline, _figures(history), _stages(history)]
    if history.episodes:
        parts.append(failure_table(history, now))
    reduced = history.reduced
    if reduced:
        newest, times = reduced[-1], f'times that protection was reduced: {len(reduced)}'
        last = f'last {duration(now - newest.time)} ago on rank {newest.rank}: {newest.reason}'
        parts.append(Text(f'{times}, {last}', 'yellow'))
    return Group(*parts)


def silent(history: History) -> list[int]:
    """Ranks that committed nothing during two windows of the others; none in a recovery."""
    if history.episodes and history.episodes[-1].end is None:
        return []
    newest = {rank: history.by_rank[rank][-1].iteration for rank in history.members}
    most = 2 * _between_windows(history)
    return [rank for rank, at in newest.items() if max(newest.values()) - at > most]


def _between_windows(history: History) -> float:
    """Most iterations between windows in a rank's events, which omit some short ones."""
    return max(1, history.window, WINDOW_EVERY_S / history.pace.iteration_s if history.pace else 0)


def missing(history: History) -> list[int]:
    places = (history.places[rank] for rank in history.members if rank in history.places)
    size = max((place.world_size for place in places), default=0)
    return sorted(set(range(size)) - history.by_rank.keys())


def _headline(history: History, now: float) -> tuple[str, int]:
    """The activity of the job, and its health as far as that says it."""
    if history.finished:
        return f'finished at iteration {history.of_iterations}', 0
    silence = max(now - history.end, 0.0)
    late = max(_LATE_S, _LATE_WINDOWS * history.window_s)
    dead = max(_DEAD_S, _DEAD_WINDOWS * history.window_s)
    last = history.episodes[-1] if history.episodes else None
    doing, harm, most = f'training, iteration {history.of_iterations}', 0, late
    if last is not None and last.end is None:
        reasons = '; '.join(last.reasons) or 'all workers start again'
        lasting = duration(last.away_s(now))
        doing, harm, most = f'RECOVERING for {lasting}: {reasons}', 1, dead
    elif history.trained_from >= history.end:
        doing, most = 'starting', dead
    if silence <= most:
        return f'{doing}, last event {duration(silence)} ago', harm
    text = (
        f'NO HEARTBEAT for {duration(silence)}; before that: {doing}. Look whether its '
        'processes run, and at the log of the launcher'
    )
    return text, 2 if silence > dead else 1


def health(history: History, now: float) -> int:
    """0 well, 1 lagging, silent or recovering, 2 dead."""
    if history.finished:
        return 0
    lags = bool(silent(history) or missing(history) or _is_late(history))
    return max(_headline(history, now)[1], int(lags))


def _is_late(history: History) -> bool:
    """True if a failure now would cost many windows."""
    newest = history.newest_window
    age = history.kept if newest is None else history.iteration - newest
    return age > _LATE_WINDOWS * _between_windows(history)


def summary(history: History, now: float) -> dict[str, Any]:
    """The screen, and all failures, as JSON; seconds, iterations and shares; None: unknown."""
    pace, time = history.pace, shares(history)
    return {
        'health': ('well', 'lagging', 'dead')[health(history, now)],
        'state': _headline(history, now)[0],
        'finished': history.finished,
        'iteration': history.iteration,
        'train_iterations': history.about and history.about.train_iterations,
        'last_event': history.end,
        'iteration_s': pace and pace.iteration_s,
        'exposed_s': pace and pace.exposed_s,
        'overhead': pace and pace.overhead,
        'loss': history.losses[-1].loss if history.losses else None,
        'ettr': time and time.ettr,
        'seconds': time and time._asdict(),
        'window': history.window,
        'newest_window': history.newest_window,
        'silent': silent(history),
        'missing': missing(history),
        'slow': [{name: getattr(one, name) for name in _OF_SLOW} for one in history.slow],
        'work': history.work,
        'stages': [
            {'stage': stage, 'ranks': {rank: history.doing[rank] for rank in ranks}}
            for stage, ranks in history.by_stage(history.members)
        ],
        'failures': [
            {name: getattr(one, name) for name in _OF_FAILURE} for one in history.episodes
        ],
        'protection_reduced': [one.reason for one in history.reduced],
    }


def _figures(history: History) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    recent = [piece for rank in history.members for piece in history.progress[rank][-_RECENT:]]
    pace, time = Pace.of(recent), shares(history)
    if pace is not None:
        shown = f'{duration(pace.iteration_s)}, overhead {pace.overhead:.3f}'
        table.add_row('iteration', shown)
        if history.about and history.about.train_iterations and not history.finished:
            left = max(history.about.train_iterations - history.iteration, 0) * pace.iteration_s
            table.add_row('left', f'about {duration(left)}, without failures')
    if history.losses:
        newest = history.losses[-1]
        table.add_row('loss', f'{loss(newest.loss)}, logged at iteration {newest.iteration}')
    if time is not None:
        table.add_row('effective training time', f'{time.ettr:.1%} of {duration(time.wall)}')
    if not history.finished:  # else nothing is left to protect
        table.add_row('protection', _protection(history))
    if history.slow and not history.finished:
        table.add_row('slowest', Text(slowest(history), 'yellow'))
    if history.guests:
        table.add_row('nodes', Text(history.guests, 'yellow'))
    if history.layouts:
        table.add_row('layout', '; before that '.join(history.layouts))
    for title, ranks in (('SILENT ranks', silent(history)), ('MISSING ranks', missing(history))):
        if ranks:
            table.add_row(title, Text(' '.join(map(str, ranks)), 'bold red'))
    return table


def slowest(history: History) -> str:
    """The slowest rank that is slow now, and the number of others."""
    first, *others = history.slow
    lasting = first.iterations + history.iteration - first.iteration
    more = f'; {len(others)} more are slow' if others else ''
    return f'{in_words(first)} for {lasting} iterations{more}'


def in_words(one: SlowRank) -> str:
    return f'rank {one.slow} on {one.node}, {one.ratio:.2f} times the median of its stage'


def _protection(history: History) -> Text:
    newest = history.newest_window
    if newest is None:
        return Text('no window is safe on all ranks yet: a failure starts over', 'red')
    age = history.iteration - newest
    text = f'newest window that all have begins at {newest}, {age} iterations ago'
    return Text(f'{text}; windows of {history.window}', 'red' if _is_late(history) else '')


def _stages(history: History) -> Table:
    present = [one for one in Doing if any(history.doing[r] is one for r in history.members)]
    words = [f'>{doing.split(" ")[0]}' for doing in present]
    rows = []
    for stage, ranks in history.by_stage(history.members):
        name = 'all' if stage is None else str(stage)
        doing = Counter(history.doing[rank] for rank in ranks)
        cells = (str(doing[one] or '') for one in present)
        newest = [history.by_rank[rank][-1].iteration for rank in ranks]
        iterations = ' to '.join(map(str, sorted({min(newest), max(newest)})))
        rows.append((name, _hosts(history, ranks), str(len(ranks)), *cells, iterations))
    return table(('>stage', 'hosts', '>ranks', *words, '>iteration'), rows, title='Stages', **_BARE)


def _hosts(history: History, ranks: list[int]) -> str:
    nodes = {history.places[rank].node: None for rank in ranks if rank in history.places}
    shown = ' '.join(list(nodes)[:_HOSTS])
    return shown if len(nodes) <= _HOSTS else f'{shown} and {len(nodes) - _HOSTS} more'


def failure_table(history: History, now: float) -> Table:
    """The newest failures and how the job came back from each."""
    columns = ('>!at', 'came back', '>replaced', '>replayed', '>verified', '>differ', '>!away')
    newest, rows = history.episodes[-_RECOVERIES:], []
    for one in newest:
        replaced = ' '.join(map(str, one.replaced)) or '–'
        counts = map(str, (one.replayed, one.verified, len(one.differing)))
        rows.append((clock(one.start), one.scope, replaced, *counts, duration(one.away_s(now))))
    styles = ['bold red' if one.differing else None for one in newest]
    title = f'Newest of {len(history.episodes)} failures'
    return table(columns, rows, styles, title=title, **_BARE)


if __name__ == '__main__':
    sys.exit(main())
