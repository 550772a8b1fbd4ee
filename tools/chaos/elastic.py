# SPDX-License-Identifier: Apache-2.0
"""Kills all processes of a job repeatedly, and restarts the job in another layout each time.

The final state is compared, bit for bit, with that of plain Megatron, which goes through the same
layouts from one dense checkpoint to the next. Windows have one iteration, so the state after a
window is exact in any layout. Dropout is off: upstream drops the streams of random numbers when the
number of stages changes, so these may differ. No run attempt may begin before a window that all
ranks had, and the files left in the tmpfs after each attempt must not grow.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from moevement_ext.events import Event, RecoveryStarted, WindowPersisted

from ..lab.digests import Difference, differences, read_digest
from ..lab.evidence import kind_of
from ..lab.following import read_events
from ..lab.job import DIGEST, Job
from ..lab.launch import Launch
from ..lab.programs import LabError
from .configuration import BF16, RUN_ID, Configuration, Layout, parse_layout

EVENTS = 'events'
LAYOUTS = tuple(map(parse_layout, 'ep2 ep3 ep4 dp4-ep2 pp2-ep2 pp2-vp2-ep2'.split()))
"""Upstream loads a checkpoint of any of them in any other."""
_LAST = LAYOUTS[2]  # on all nodes, so that each node removes its files
_MORE = '--num-experts 12 --global-batch-size 12 --lr-decay-iters 400'.split()
_DENSE = '--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable'.split()
_ITERATIONS_PER_LIFE = 10
_IN_RESHARD = 0.2
_BEHIND = 12  # iterations by which the newest window may lag behind the log
_FIRST = 5  # attempts that set the expected usage of the tmpfs


class Life(NamedTuple):
    """One start of the job."""

    layout: Layout
    nodes: int
    iterations: int = 0
    """Iterations beyond those of the previous attempt's log, until all processes are killed."""
    delay_s: float = 0.0
    """Seconds from the log line of the last of them to SIGKILL."""
    in_reshard: bool = False
    """Killed instead while it assembles the windows of the previous layout."""


class Lived(NamedTuple):
    """Result of a run attempt."""

    life: Life
    began: int | None
    """Iteration of the state that it resumed from; None: it was killed before that."""
    layouts: int
    """Number of layouts with files in the tmpfs at its end."""
    nbytes: int

    def line(self) -> str:
        went_on = 'was killed' if self.began is None else f'went on from {self.began}'
        return (
            f'{self.life.layout.name} on {self.life.nodes} nodes {went_on}: '
            f'{self.nbytes} bytes of {self.layouts} layouts in the tmpfs'
        )


def _configuration(layout: Layout) -> Configuration:
    """A number of nodes plays no part, and nothing hangs."""
    return Configuration(layout, BF16, (), window=1, nodes=2, hang_timeout_s=60)


def draw_lives(seed: int, restarts: int) -> list[Life]:
    rng = random.Random(f'{seed} elastic')
    lives: list[Life] = []
    for _ in range(restarts):
        layout = rng.choice([one for one in LAYOUTS if not lives or one != lives[-1].layout])
        nodes = {2: rng.choice((1, 2)), 3: 1}.get(layout.ranks, 2)
        in_reshard = bool(lives) and not lives[-1].in_reshard and rng.random() < _IN_RESHARD
        moment = rng.randint(2, 4), round(rng.uniform(0, 0.5), 3)
        lives.append(Life(layout, nodes, *moment, in_reshard))
    return [*lives, Life(_LAST, 2)]


def run_here(
    folder: Path, flags: Sequence[str], life: Life, kill_at: int | None = None, fail_at: str = ''
) -> int:
    """Run a job to its end, or kill it.

    Args:
        folder: folder for logs, which does not exist yet.
        flags: flags of the job.
        life: its layout, and the delay before it is killed.
        kill_at: iteration after whose log line all processes are killed; None: none is.
        fail_at: `MOEVEMENT_FAIL_AT` of a job that dies before it trains.

    Returns:
        The last iteration of its log, 0 without one.
    """
    workers = life.layout.ranks // life.nodes
    launch = Launch(folder, flags, life.nodes, workers, spares=1)
    with Job(launch._replace(variables={'MOEVEMENT_FAIL_AT': fail_at})) as job:
        if fail_at:
            with suppress(LabError):
                job.finish()
            return 0
        if kill_at is None:
            job.finish()
        else:
            job.kill_after(kill_at, (), life.delay_s)
            job.kill()
        return job.read_log().newest_until(math.inf)


@dataclass(frozen=True)
class ElasticCampaign:
    """One job with all its lives, and the run of plain Megatron after it."""

    output: Path
    data: Path
    memory: Path
    lives: Sequence[Life]
    """The last one ends by itself."""
    run: Callable[..., int] = run_here
    lived: list[Lived] = field(default_factory=list)

    def live(self) -> Iterator[Lived]:
        """Start the job repeatedly; yields each life when it is over."""
        at = persisted = 0
        for number, life in enumerate(self.lives):
            folder = self._folder(number)
            flags = [*self._training(life.layout, folder), *self._protection(life.layout, folder)]
            kill_at, fail_at = at + life.iterations, ''
            if life.in_reshard:  # while a rank assembles any window up to the newest iteration
                points = range(max(at - _BEHIND, 0), at + 1)
                fail_at = ','.join(f'0:{number + 1}:reshard' for number in points)
            lasts = life.in_reshard or life is self.lives[-1]
            at = max(at, self.run(folder, flags, life, None if lasts else kill_at, fail_at))
            events = read_events(folder / EVENTS)
            self.lived.append(self._lived(life, folder.name, events, persisted))
            windows = (event.start for event in kind_of(events, WindowPersisted))
            persisted = max(persisted, *windows, 0)
            yield self.lived[-1]

    def _lived(self, life: Life, name: str, events: Sequence[Event], persisted: int) -> Lived:
        went_on = kind_of(events, RecoveryStarted)
        if life.in_reshard and went_on:
            raise LabError(f'{name} was to be killed before it went on')
        began = went_on[-1].dense_at if went_on else None if life.in_reshard else 0
        if began is not None and began < persisted:
            raise LabError(f'{name} went on from {began}, though all ranks had {persisted}')
        left = [*self.memory.glob(f'{RUN_ID}*')]
        files = (path for folder in left for path in folder.rglob('*') if path.is_file())
        nbytes = sum(512 * path.stat().st_blocks for path in files)
        return Lived(life, began, len(left), nbytes)

    def different(self) -> list[Difference]:
        """Differences from plain Megatron, except in streams of random numbers."""
        lives = [(one.life, one.began) for one in self.lived if one.began is not None]
        ends = [*(began for _, began in lives[1:]), None]
        load: list[str] = []
        for number, ((life, began), end) in enumerate(zip(lives, ends, strict=True)):
            if began == 0:
                load = []  # it had nothing to resume from
            if end is not None and end <= began:
                continue
            folder = self.output / f'plain{number}'
            dense = ['--save', str(folder / 'dense'), '--save-interval', str(end), *_DENSE]
            until = [] if end is None else ['--exit-interval', str(end), *dense]
            flags = [*self._training(life.layout, folder), *load, *until]
            self.run(folder, flags, Life(life.layout, 1))
            load = ['--load', str(folder / 'dense'), *_DENSE]
        found = differences(
            read_digest(folder / DIGEST), read_digest(self._folder(len(self.lived) - 1) / DIGEST)
        )
        return [one for one in found if not one.name.startswith('rng/')]

    def growth(self) -> str | None:
        """Reason why usage of the tmpfs grew, or files were left at the end; None if neither.

        An attempt that is killed before its first window also leaves those of the previous layout.
        """
        *killed, last = self.lived
        if last.layouts:
            return f'{last.layouts} layouts with {last.nbytes} bytes are left at the end'
        most = 2 * max(one.nbytes for one in killed[:_FIRST])
        grown = ((number, one.nbytes) for number, one in enumerate(killed) if one.nbytes > most)
        for number, nbytes in grown:
            return f'life {number} left {nbytes} bytes, the first ones half of {most}'
        return None

    def summary(self, identical: bool) -> str:
        layouts = {one.life.layout for one in self.lived}
        sizes = sorted({layout.ranks for layout in layouts})
        return (
            f'chaos: restarts={len(self.lived) - 1} layouts={len(layouts)} '
            f'ranks={",".join(map(str, sizes))} bit_identical={str(identical).lower()} '
            f'flat={str(self.growth() is None).lower()}'
        )

    def _folder(self, number: int) -> Path:
        return self.output / f'life{number}'

    def _training(self, layout: Layout, folder: Path) -> list[str]:
        iterations = _ITERATIONS_PER_LIFE * len(self.lives)
        flags = _configuration(layout).training_flags(self.data, iterations, folder)
        return [*flags, *_MORE, '--sparse-ckpt-digest', str(folder / DIGEST)]

    def _protection(self, layout: Layout, folder: Path) -> list[str]:
        flags = _configuration(layout).sparse_flags(self.memory, folder)
        flags.remove('--sparse-ckpt-strict')  # nodes come and go
        return [*flags, '--sparse-ckpt-elastic', 'restart']
