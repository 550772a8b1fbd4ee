# SPDX-License-Identifier: Apache-2.0
r"""Iterations of a pipeline that has lost a node without a spare, over those without a failure.

    moevement simulate reroute
    moevement simulate reroute --model job.json

Guests, routes, and what ReCycle adds to routes, for the presets of `moevement plan`, or for one
model as there. Semantics: docs/simulator.md, "A lost node".

Exit status: 0 done, 2 a flag or file breaks a rule.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import product
from typing import NamedTuple

from rich.console import Console

from ..lab.fields import require
from ..lab.programs import program
from ..lab.tables import table
from ..model.description import PRESETS, Training, known_or_read
from .scenario import errors

FORWARD, BACKWARD, WEIGHTS = range(3)  # a free device takes the first kind of pass that it has
_GPUS_OF_NODE = 8
_COLUMNS = '!model|>!lost|>!P|>!M|>!guests|>!routes|>!alone|>!split|>!staggered'.split('|')

type Run = tuple[int, int]  # line, and place in it
type Device = tuple[int, int]  # unit and stage


class MicroBatch(NamedTuple):
    """What one run of a schedule computes, with its device in each stage."""

    order: int
    run: Run
    devices: list[Device]


def ends(
    batches: Sequence[MicroBatch], after: Mapping[Run, Run], *, split: bool = False
) -> dict[Run, int]:
    """Time at which each run ends, if each pass takes 1, and communication none.

    In each stage a run begins after the one before it in its line, and after that of `after`.
    `split`: gradients of weights are passes of their own, and not half of a backward pass. A device
    has room for activations of twice as many micro-batches, in a stage, as there are stages.
    """
    seconds, last = ((1, 1, 1), WEIGHTS) if split else ((1, 2), BACKWARD)
    stages = len(batches[0].devices)
    left = Counter[object](
        (one.run, at) for one in batches for at in range(stages) for _ in seconds
    )
    waiting = [(one, 0) for one in sorted(batches)]  # micro-batch and step: stages and back
    ready = defaultdict[Device, list[tuple[int, MicroBatch, int]]](list)
    running: list[tuple[int, int, MicroBatch, int]] = []
    busy, held, ended, now = set[Device](), Counter[object](), dict[Run, int](), 0

    def is_ready(batch: MicroBatch, step: int) -> bool:
        kind, stage = step // stages, min(step, 2 * stages - 1 - step)
        if kind == FORWARD:
            before = (batch.run[0], batch.run[1] - 1), after.get(batch.run)
            place = batch.devices[stage], stage
            if held[place] == 2 * stages or any(left[one, stage] for one in before):
                return False
            held[place] += 1
        heappush(ready[batch.devices[stage]], (kind, batch, step))
        return True

    def finish(kind: int, batch: MicroBatch, step: int) -> None:
        stage = min(step, 2 * stages - 1 - step)
        busy.remove(device := batch.devices[stage])
        held[device, stage] -= kind == last
        left[batch.run, stage] -= 1
        ended[batch.run] = now
        if kind == BACKWARD and split:
            heappush(ready[device], (WEIGHTS, batch, step))
        if kind != WEIGHTS and step + 1 < 2 * stages:
            waiting.append((batch, step + 1))

    while True:
        waiting = [one for one in waiting if not is_ready(*one)]
        for device in [one for one in ready if ready[one] and one not in busy]:
            kind, batch, step = heappop(ready[device])
            busy.add(device)
            heappush(running, (now + seconds[kind], kind, batch, step))
        if not running:
            assert not any(left.values())
            return ended
        now = running[0][0]
        while running and running[0][0] == now:
            finish(*heappop(running)[1:])


class Job(NamedTuple):
    """Some units have lost their ranks of the middle stage."""

    units: int
    lost: int
    stages: int
    micro_batches: int

    def ratios(self) -> list[float]:
        """Iterations over those without a failure, in the order of the columns."""
        found = [self.rerouted(1)]
        if hosts := self.units - self.lost:
            found += [self.routes(), self.rerouted(hosts), self.rerouted(hosts, split=True)]
            found.append(self.rerouted(hosts, split=True, iterations=3))
        return [seconds / (3 * (self.micro_batches + self.stages - 1)) for seconds in found]

    def routes(self) -> int:
        """Each host runs a part of its own, a piece of each guest in turn, and the rest."""
        total, hosts = self.micro_batches, self.units - self.lost
        batches, after = list[MicroBatch](), dict[Run, Run]()
        for turn in range(hosts):
            first, end = (total * at // hosts for at in (turn, turn + 1))
            pieces = [((unit, turn), end - first) for unit in range(self.lost)]
            host, before = self.lost + turn, (-1, -1)
            devices = [(host, stage) for stage in range(self.stages)]
            for run, number in ((host, 0), first), *pieces, ((host, 1), total - first):
                after[run] = before
                batches += [MicroBatch(order, run, devices) for order in range(number)]
                before = run if number else before
        return max(ends(batches, after).values())

    def rerouted(self, hosts: int, *, split: bool = False, iterations: int = 1) -> int:
        """The last iteration, if `hosts` units (without one: a stage) compute for a lost rank."""
        batches, middle, whole = [], self.stages // 2, self.units - self.lost
        counts = iterations, self.units, self.micro_batches
        for number, unit, order in product(*map(range, counts)):
            devices = [(unit, stage) for stage in range(self.stages)]
            if unit < self.lost:
                host = whole and self.lost + (unit + order % hosts) % whole
                devices[middle] = (host, middle) if whole else (unit, middle - 1)
            batches.append(MicroBatch(number * self.micro_batches + order, (0, number), devices))
        times = [0, *ends(batches, {}, split=split).values()]
        return times[-1] - times[-2]


def job_of(training: Training) -> Job:
    layout = training.layout
    require(layout.pipeline > 1, 'model', f'of {layout.pipeline} stage', 'give one with a pipeline')
    lost = -(-min(_GPUS_OF_NODE, layout.stage_ranks) * layout.units // layout.stage_ranks)
    return Job(layout.units, lost, layout.pipeline, training.batch.micro_batches(layout.data))


def main(argv: Sequence[str] | None = None) -> int:
    parser = program('simulate reroute', __doc__)
    args = parser.parse_args(argv)
    with errors(parser):
        one = args.model and {args.model: known_or_read(args.model, Training, PRESETS, '--model')}
        jobs = {name: job_of(training) for name, training in (one or PRESETS).items()}
    rows = [
        (name, f'{job.lost}/{job.units}', *map(str, job[2:]), *map('{:.3f}'.format, job.ratios()))
        for name, job in jobs.items()
    ]
    Console().print(table(_COLUMNS, rows, box=None))
    return 0


if __name__ == '__main__':
    sys.exit(main())
