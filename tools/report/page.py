# SPDX-License-Identifier: Apache-2.0
"""The page: fills the template from a history, and from a plan that it is compared with."""

import shlex
import statistics
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..lab.errors import LabError
from ..lab.history import PROCESS_START, Episode, History, Shares, shares
from ..lab.text import duration, loss, readable, size
from . import charts

_DETAILED = 40  # limit of drawn recoveries; the table has all
# Colour in the template, by phase of a localized recovery or of a whole-job one.
_PHASES = {
    'detect': 0, 'find': 0, 'unblock': 1, PROCESS_START: 2, 'respawn': 1, 'load': 3, 'regroup': 3,
    'fetch': 4, 'obtain': 4, 'convert': 5, 'catch_up': 6,
}  # fmt: skip
_NOTES = 20


class Part(NamedTuple):
    """A part of a bar."""

    name: str
    share: float
    """Share of the bar, 0 to 1."""
    text: str
    style: str
    """CSS class in the template."""


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


def render(history: History, title: str, plan: 'Plan | None') -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {'duration': duration, 'size': size, 'moment': _moment}
    time = shares(history)
    drawn = charts.of_run(history)
    return environment.get_template('page.html.j2').render(
        title=title,
        history=history,
        verdict=_verdict(history),
        tiles=_tiles(history),
        time=None if time is None else _time_parts(history),
        timeline=charts.timeline(drawn, history.begun, history.end),
        failures=charts.marks(history),
        recoveries=[
            _recovery(n, episode, history, drawn) for n, episode in enumerate(history.episodes, 1)
        ],
        pace=charts.pace_chart(history),
        slots=charts.slot_bars(history),
        memory=charts.memory_rows(history),
        protection=charts.figures(history),
        about=_about(history),
        notes=_notes(history),
        forecast=[] if plan is None else compare(plan, history, time),
    )


def _moment(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime('%Y-%m-%d %H:%M:%S')


def _about(history: History) -> dict[str, str]:
    """Model, machine and software of the run, for readers outside the team."""
    about = history.about
    nodes = sorted({place.node for place in history.places.values()})
    found = {'hosts': ', '.join(nodes)} if nodes else {}
    if about is None:
        return found
    layout = '; before that '.join(history.layouts)
    versions = ', '.join(f'{name} {version}' for name, version in about.versions.items())
    return {'model': about.model, 'layout': layout, **found, 'versions': versions,
            'command': shlex.join(about.command)}  # fmt: skip


def _verdict(history: History) -> str:
    """State of the run in a sentence or two."""
    found = history.episodes
    differing = sum(len(episode.differing) for episode in found)
    verified = sum(episode.verified for episode in found)
    if not found:
        failures = 'Nothing failed.'
    elif found[-1].end is None:
        failures = f'{len(found)} failures; the job has not recovered from the last one.'
    else:
        failures = f'{len(found)} failures, all of them recovered.'
        failures = failures.replace('1 failures, all of them', '1 failure,')
    if differing:
        bits = f' {differing} recovered operators DIFFER from what had been captured.'
    elif verified:
        bits = f' All {verified} operators that could be compared were equal, bit for bit.'
    else:
        bits = ''
    ended = 'Finished' if history.finished else 'Not finished'
    return f'{ended}, iteration {history.of_iterations}. {failures}{bits}'


def _tiles(history: History) -> list[tuple[str, str, str]]:
    time, pace, found = shares(history), history.pace, history.episodes
    downs = [episode.end - episode.start for episode in found if episode.end is not None]
    return [
        ('effective training time', f'{time.ettr:.1%}' if time else 'not recorded',
         f'of {duration(time.wall)}' if time else ''),
        ('iterations', history.of_iterations,
         f'{duration(pace.iteration_s)} each' if pace else ''),
        ('loss', loss(history.losses[-1].loss) if history.losses else 'not recorded',
         'as logged last' if history.losses else ''),
        ('held up by checkpointing', f'{pace.exposed_s / pace.iteration_s:.2%}' if pace else
         'not recorded', f'{duration(pace.exposed_s)} per iteration' if pace else ''),
        ('failures', str(len(found)),
         f'{duration(statistics.median(downs))} until back, median' if downs else ''),
        ('replayed iterations', str(sum(episode.replayed for episode in found)),
         'on the stages that rolled back' if found else ''),
        ('verified operators', str(sum(episode.verified for episode in found)),
         f'{sum(len(episode.differing) for episode in found)} differ' if found else ''),
    ]  # fmt: skip


def _time_parts(history: History) -> list[Part]:
    time = shares(history)
    assert time is not None
    names = {
        'useful': 'iterations that were kept', 'exposed': 'held up by sparse checkpointing',
        'recovering': 'failures and recoveries', 'starting': 'until all ranks were set up',
        'other': 'all else (evaluation, saves, iterations done again)',
    }  # fmt: skip
    return [
        Part(names[name], seconds / time.wall, duration(seconds), name)
        for name, seconds in time._asdict().items()
    ]


def _recovery(
    number: int, episode: Episode, history: History, drawn: charts.Lanes
) -> dict[str, object]:
    """A row of the table of recoveries, and its drawing."""
    end = episode.end or history.end
    total = sum(episode.phases.values()) or 1.0
    margin = max((end - episode.start) / 8, 0.5)
    detailed = number > len(history.episodes) - _DETAILED
    return {
        'number': number,
        'at': episode.start,
        'seconds': end - episode.start,
        'over': episode.end is not None,
        'scope': episode.scope,
        'headline': _headline(episode, history),
        'reasons': [readable(reason) for reason in episode.reasons],
        'replaced': episode.replaced,
        'stages': episode.stages,
        'replayed': episode.replayed,
        'verified': episode.verified,
        'differing': episode.differing,
        'gave_up': episode.gave_up,
        'slowest': episode.slowest,
        'phases': [
            Part(name.replace('_', ' '), seconds / total, duration(seconds),
                 f'phase{_PHASES[name]}' if name in _PHASES else 'other')
            for name, seconds in episode.phases.items()
        ],
        'timeline': charts.timeline(drawn, episode.start - margin, end + margin)
        if detailed else None,
    }  # fmt: skip


def _headline(episode: Episode, history: History) -> str:
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
    reasons = (event.reason.partition('; next attempt')[0] for event in history.reduced())
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
