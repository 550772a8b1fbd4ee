# SPDX-License-Identifier: Apache-2.0
r"""Writes one page about a run, from its events (`--sparse-ckpt-events`).

    moevement report runs/events -o report.html
    moevement report runs/events --json

The page has the activity of each rank, the use of time (effective training time ratio), each
failure with the phases and verification of its recovery, host memory and slots. The page is
self-contained: no network, no script. For a running job it shows the present state.

Exit status: 0 done, 2 there is nothing to report, or the page cannot be written.
"""

import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from moevement_ext.events import SlowRank

from ..lab.evidence import kind_of
from ..lab.figures import print_json, replacing
from ..lab.history import PROCESS_START, Episode, History, read_history, shares
from ..lab.programs import LabError, Parser
from ..lab.tables import duration, loss, size
from ..status import in_words, summary
from . import charts

_PHASES = {
    'detect': 0, 'find': 0, 'unblock': 1, PROCESS_START: 2, 'respawn': 1, 'load': 3, 'regroup': 3,
    'fetch': 4, 'obtain': 4, 'convert': 5, 'catch_up': 6,
}  # fmt: skip
"""Colour in the template, by phase of a localized recovery or of a whole-job one."""
_NOTES = 20


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog='moevement report', description=__doc__)
    parser.add_argument('events', type=Path, help='folder of --sparse-ckpt-events')
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument('-o', '--output', type=Path, help='HTML file to write')
    how.add_argument('--json', action='store_true', help='print figures as JSON, as `status` does')
    parser.add_argument('--title', help='name of the run (default: the folder)')
    args = parser.parse_args(argv)
    try:
        history = read_history(args.events)
        if args.json:
            print_json(summary(history, time.time()))
            return 0
        page = render(history, args.title or str(args.events))
        with replacing(args.output) as partial:
            partial.write_text(page, 'utf-8')
    except LabError as error:
        print(f'report: {error}', file=sys.stderr)
        return 2
    except OSError as error:
        print(f'report: --output {args.output}: {error.strerror}', file=sys.stderr)
        return 2
    print(args.output)
    return 0


def render(history: History, title: str) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    formats = {one.__name__: one for one in (duration, size, loss, statistics.median)}
    environment.filters |= formats | {'moment': _moment, 'command': shlex.join}
    return environment.get_template('page.html.j2').render(
        title=title,
        history=history,
        time=shares(history),
        pace=history.pace,
        downs=[one.away_s(history.end) for one in history.episodes if one.end is not None],
        headline=partial(_headline, history),
        timeline=partial(charts.timeline, charts.of_run(history)),
        phase_styles=_PHASES,
        chart=charts.pace_chart(history),
        slots=charts.slot_bars(history),
        memory=charts.memory_rows(history),
        replans=history.replans,
        notes=_notes(history),
        slow=_slow(history),
    )


def _moment(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime('%Y-%m-%d %H:%M:%S')


def _headline(history: History, episode: Episode) -> str:
    """The lost workers, or else the reasons that survivors detected."""
    if not episode.reasons:
        return 'all workers were started again'
    named = [reason for reason in episode.reasons if reason.startswith('rank ')]
    if named or not episode.replaced:  # the launcher saw the failure, and named it
        return '; '.join(named or episode.reasons)
    nodes: dict[str, list[int]] = {}
    for rank in episode.replaced:
        place = history.places.get(rank)
        nodes.setdefault(place.node if place else '', []).append(rank)
    words = []
    for node, ranks in sorted(nodes.items()):
        plural = 's' if len(ranks) > 1 else ''
        where = f' (now on {node})' if node else ''
        words.append(f'rank{plural} {" ".join(map(str, ranks))}{where}')
    return f'{", ".join(words)} replaced'


def _slow(history: History) -> list[str]:
    """What was said of slow ranks, the newest last."""
    return [
        f'iteration {one.iteration}: {in_words(one)}, '
        + (f'for {one.iterations} iterations' if one.iterations else 'slow no more')
        for one in kind_of(history.events, SlowRank)[-_NOTES:]
    ]


def _notes(history: History) -> list[str]:
    """Reductions of protection, the newest last; repeated ones are counted."""
    reasons = (event.reason.partition('; next attempt')[0] for event in history.reduced)
    counts = Counter(reasons)
    found = [reason if n == 1 else f'{reason} ({n} times)' for reason, n in counts.items()]
    return found[-_NOTES:]


if __name__ == '__main__':
    sys.exit(main())
