# SPDX-License-Identifier: Apache-2.0
"""The page: fills the template from a history, and from a plan that it is compared with."""

import shlex
import statistics
from collections import Counter
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..lab.errors import LabError
from ..lab.history import PROCESS_START, Episode, History, Shares, shares
from ..lab.text import duration, loss, readable, size
from . import charts

_PHASES = {
    'detect': 0, 'find': 0, 'unblock': 1, PROCESS_START: 2, 'respawn': 1, 'load': 3, 'regroup': 3,
    'fetch': 4, 'obtain': 4, 'convert': 5, 'catch_up': 6,
}  # fmt: skip
"""Colour in the template, by phase of a localized recovery or of a whole-job one."""
_NOTES = 20


class Plan(msgspec.Struct):
    """The used part of the JSON of `tools.plan`; seconds and bytes."""

    iteration_s: float
    window: int
    overhead_s: float
    host_memory_bytes_per_node: dict[str, int]
    mtbf_s: float | None
    """None: no failures."""
    expected_recovery_s: float

    def ettr(self, mtbf_s: float | None) -> float:
        """Effective training time ratio at another MTBF, by first order (None: no failures)."""
        ratio = self.iteration_s / (self.iteration_s + self.overhead_s)
        return ratio if mtbf_s is None else ratio / (1 + self.expected_recovery_s / mtbf_s)


def render(history: History, title: str, plan: Plan | None) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        'duration': duration, 'size': size, 'loss': loss, 'readable': readable, 'moment': _moment,
        'median': statistics.median, 'command': shlex.join,
    }  # fmt: skip
    time = shares(history)
    return environment.get_template('page.html.j2').render(
        title=title,
        history=history,
        time=time,
        pace=history.pace,
        downs=[one.end - one.start for one in history.episodes if one.end is not None],
        headline=partial(_headline, history),
        timeline=partial(charts.timeline, charts.of_run(history)),
        phase_styles=_PHASES,
        chart=charts.pace_chart(history),
        slots=charts.slot_bars(history),
        memory=charts.memory_rows(history),
        replans=history.replans,
        notes=_notes(history),
        forecast=[] if plan is None else compare(plan, history, time),
    )


def _moment(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime('%Y-%m-%d %H:%M:%S')


def _headline(history: History, episode: Episode) -> str:
    """The lost workers, or else the reasons that survivors detected."""
    if not episode.reasons:
        return 'all workers were started again'
    named = [reason for reason in episode.reasons if reason.startswith('rank ')]
    if named or not episode.replaced:  # the launcher saw the failure, and named it
        return '; '.join(readable(reason) for reason in named or episode.reasons)
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


def _notes(history: History) -> list[str]:
    """Reductions of protection, the newest last; repeated ones are counted."""
    reasons = (event.reason.partition('; next attempt')[0] for event in history.reduced)
    counts = Counter(reasons)
    found = [reason if n == 1 else f'{reason} ({n} times)' for reason, n in counts.items()]
    return found[-_NOTES:]


def read_plan(path: Path) -> Plan:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Plan)
    except OSError as error:
        raise LabError(f'--plan {path}: {error.strerror}') from error
    except msgspec.MsgspecError as error:
        raise LabError(
            f'--plan {path}: {error}; give what `moevement plan --json` printed'
        ) from error


def compare(plan: Plan, history: History, shares: Shares | None) -> list[tuple[str, str, str]]:
    """Name of each figure, planned, measured; a dash where the run has none yet."""
    pace = history.pace
    downs = [episode.end - episode.start for episode in history.episodes if episode.end]
    nodes: Counter[str] = Counter()
    for place in history.places.values():
        nodes[place.node] += sum(place.host_memory.values())
    planned_memory = plan.host_memory_bytes_per_node.get('total', 0)
    return [
        ('window', str(plan.window), str(history.window or '–')),
        ('iteration', duration(plan.iteration_s),
         duration(pace.iteration_s - pace.exposed_s) if pace else '–'),
        ('held up per iteration', duration(plan.overhead_s),
         duration(pace.exposed_s) if pace else '–'),
        ('host memory of the fullest node', size(planned_memory),
         size(max(nodes.values())) if nodes else '–'),
        ('time between failures', duration(plan.mtbf_s) if plan.mtbf_s else 'no failures',
         duration(history.mtbf_s) if history.mtbf_s else 'no failures'),
        ('time lost by a failure', duration(plan.expected_recovery_s),
         duration(statistics.mean(downs)) if downs else '–'),
        ('ETTR at the planned failure rate', f'{plan.ettr(plan.mtbf_s):.4f}', '–'),
        ('ETTR at the failure rate of the run', f'{plan.ettr(history.mtbf_s):.4f}',
         f'{shares.ettr:.4f}' if shares else '–'),
    ]  # fmt: skip
