# SPDX-License-Identifier: Apache-2.0
"""The frame of all benchmarks: ways take turns over several rounds; figures of each over these.

A slow phase of the machine affects all ways; ratios are taken within a round.
"""

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import psutil
from rich.console import Console

from ..lab import tables
from ..lab.fields import Whole, parser_of
from ..lab.figures import Spread, write_json
from ..lab.models import prepare
from ..lab.programs import LabError, program, run_tool

_LEAST_WIDTH = 100
_GIB = 1 << 30


class Hardware(msgspec.Struct, frozen=True):
    """Machine and software versions; no names of hosts or folders."""

    processor: str
    cores: int
    memory_gib: float
    gpu: str | None
    load_average: float
    """Load of the last minute at the start of the benchmark: other work on the cores."""
    torch: str
    megatron_core: str

    @classmethod
    def here(cls, gpu: bool) -> 'Hardware':
        import torch  # too slow for --help

        return cls(
            processor=_processor(),
            cores=len(os.sched_getaffinity(0)),
            memory_gib=round(psutil.virtual_memory().total / _GIB, 1),
            gpu=torch.cuda.get_device_name() if gpu else None,
            load_average=round(os.getloadavg()[0], 2),
            torch=str(torch.__version__),
            megatron_core=installed('megatron-core'),
        )

    def line(self) -> str:
        device = f'{self.gpu}, ' if self.gpu else ''
        return (
            f'{device}{self.processor}, {self.cores} cores, {self.memory_gib:.0f} GiB, load '
            f'{self.load_average:.1f} at the start; torch {self.torch}, megatron-core '
            f'{self.megatron_core}'
        )


def _processor() -> str:
    for line in Path('/proc/cpuinfo').read_text('utf-8').splitlines():
        if line.startswith('model name'):
            return line.partition(':')[2].strip()
    return platform.machine()


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return 'not installed'


class Figure(NamedTuple):
    """A figure of a measurement, or words about it, and its column."""

    heading: str
    form: str = '.2f'
    of: Callable[[Any, Any], float | str | None] | None = None
    """From a measurement, and from that of the way it is compared with in the same round; None
    does not count. By default the attribute of the figure's name."""
    ranged: bool = True
    """Show the range over the rounds, too."""

    def cell(self, spread: Spread) -> str:
        least, middle, most = (
            format(value, self.form) for value in (spread.min, spread.median, spread.max)
        )
        one = spread.min == spread.max or not self.ranged
        return middle if one else f'{middle}  ({least} to {most})'


class Way(msgspec.Struct, frozen=True):
    """One way to do what is measured, over all rounds."""

    title: str
    figures: dict[str, Spread]
    words: dict[str, str] = {}


class Report(msgspec.Struct, frozen=True):
    """What a benchmark has found."""

    hardware: Hardware
    settings: dict[str, Any]
    """Flags."""
    ways: dict[str, Way]
    different: list[str]
    """What must be equal, and is not."""
    rounds: Any
    """Measurements by way, of each round."""
    notes: list[str] = []
    """What the table does not show."""

    @property
    def exact(self) -> bool:
        return not self.different


class Bench:
    """A benchmark with its parsed flags; the text of its module is its help."""

    PROG: ClassVar[str]
    ROUNDS: ClassVar[int] = 3
    """0: there are no rounds of jobs."""
    OUTPUT: ClassVar[str] = 'runs/bench'
    FIGURES: ClassVar[Mapping[str, Figure]]
    """By name, in the order of their columns."""
    TITLES: ClassVar[Mapping[str, str]] = {}
    """Titles of all ways by name, in the order of their turns."""
    ONLY: ClassVar[tuple[str, Sequence[str]] | None] = None
    """Help of the flag that chooses ways, and its default; None: there is no such flag."""
    WORDS: ClassVar[Mapping[str, str]] = {}
    """Fields of the help texts of its flags."""

    def __init__(self, args: argparse.Namespace, output: Path, data: Path) -> None:
        self.args, self.output, self.data = args, output, data
        self.failed: dict[str, str] = {}
        """Why ways did not run, by title."""

    # Each benchmark has its own

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        """Refuse flags that do not go together, and fill in defaults."""

    def titles(self) -> Mapping[str, str]:
        """Those of `TITLES` that take turns."""
        return self.TITLES

    def begin(self, number: int) -> None:
        """Called before each round."""

    def run(self, way: str, number: int) -> Any:
        """Measure a way in a round."""
        raise NotImplementedError

    def may_fail(self, way: str) -> bool:
        """True if the others go on where a way raises LabError."""
        return False

    def line(self, one: Any) -> str:
        """Progress after a measurement."""
        return f'{one.seconds:7.3f} s'

    def beside(self, way: str) -> str:
        """The way that another one is compared with."""
        return next(iter(self.titles()))

    def different(self, rounds: Sequence[Mapping[str, Any]]) -> list[str]:
        """What must be equal, and is not: kinds of state that the measurements name."""
        kinds = (getattr(run, 'different', ()) for one in rounds for run in one.values())
        return sorted({kind for found in kinds for kind in found})

    def notes(self, report: Report) -> Iterable[str]:
        return ()

    @classmethod
    def draw(cls, args: argparse.Namespace, report: Report) -> None:
        """Write a picture, if one is wanted."""

    # The frame

    @classmethod
    def parse(cls, argv: Sequence[str] | None) -> argparse.Namespace:
        about = sys.modules[cls.__module__].__doc__
        parser = program(cls.PROG.removeprefix('moevement '), about, cls.WORDS)
        if cls.ROUNDS:
            about = f'rounds over all ways (default: {cls.ROUNDS})'
            parser.add_argument('--rounds', type=parser_of(Whole), help=about)
            parser.add_argument('--output', type=Path, default=Path(cls.OUTPUT), help='of logs')
        for name, what in (('json', 'report'), ('table', 'table, for a document,')):
            about = f'write the {what} here'
            parser.add_argument(f'--{name}', type=Path, metavar='FILE', help=about)
        if cls.ONLY:
            about, usual = cls.ONLY
            parser.add_argument('--only', choices=cls.TITLES, nargs='+', default=usual, help=about)
        args = parser.parse_args(argv)
        cls.check(parser, args)
        if cls.ROUNDS:
            args.rounds = args.rounds or cls.ROUNDS
        return args

    @classmethod
    def main(cls, argv: Sequence[str] | None = None) -> int:
        args = cls.parse(argv)
        return run_tool(cls.PROG.removeprefix('moevement '), partial(cls.run_all, args))

    @classmethod
    def run_all(cls, args: argparse.Namespace, console: Console) -> int:
        """Measure, write, show; returns the exit status: 0 done, 1 not exact.

        Nothing is measured unless the files can be written.
        """
        for flag, target in (('json', args.json), ('table', args.table)):
            try:
                if target:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.open('ab').close()
            except OSError as error:
                raise LabError(f'--{flag} {target}: {error.strerror}') from error
        report = cls.measure(args, console)
        if args.json:
            write_json(args.json, report)
        print_report(report, cls.FIGURES, console)
        if args.table:
            args.table.write_text(markdown(report, cls.FIGURES), 'utf-8')
        cls.draw(args, report)
        return 0 if report.exact else 1

    @classmethod
    def measure(cls, args: argparse.Namespace, console: Console) -> Report:
        hardware = Hardware.here(gpu=getattr(args, 'share_gpu', False))
        places = prepare(args, cls.PROG.split()[-1]) if cls.ROUNDS else (Path(), Path())
        bench = cls(args, *places)
        return bench.summary(hardware, bench.take_turns(console))

    def take_turns(self, console: Console) -> list[dict[str, Any]]:
        rounds: list[dict[str, Any]] = []
        for number in range(1, self.args.rounds + 1):
            self.begin(number)
            rounds.append({})
            for way, title in self.titles().items():
                try:
                    rounds[-1][way] = one = self.run(way, number)
                except LabError as error:
                    if not self.may_fail(way):
                        raise
                    line = self.failed[title] = str(error)
                else:
                    line = self.line(one)
                tables.say(console, f'round {number}: {line}  {title}')
        return rounds

    def summary(self, hardware: Hardware, rounds: Sequence[Mapping[str, Any]]) -> Report:
        found = {way: [one for one in rounds if way in one] for way in self.titles()}
        ways = {way: self._over_rounds(way, own) for way, own in found.items() if own}
        if not ways:
            raise LabError('nothing ran; see the messages above')
        kinds = (int, float, str, list)
        settings = {name: one for name, one in vars(self.args).items() if isinstance(one, kinds)}
        report = Report(hardware, settings, ways, self.different(rounds), rounds)
        missing = [f'{title} did not run: {why}' for title, why in self.failed.items()]
        return msgspec.structs.replace(report, notes=[*missing, *self.notes(report)])

    def _over_rounds(self, way: str, rounds: Sequence[Mapping[str, Any]]) -> Way:
        figures: dict[str, Spread] = {}
        words: dict[str, str] = {}
        pairs = [(one[way], one.get(self.beside(way))) for one in rounds]
        for name, figure in self.FIGURES.items():
            found = [figure.of(*pair) if figure.of else getattr(pair[0], name) for pair in pairs]
            if values := [value for value in found if isinstance(value, int | float)]:
                figures[name] = Spread.of(values)
            if said := [value for value in found if isinstance(value, str)]:
                words[name] = ', '.join(dict.fromkeys(said))
        return Way(self.titles()[way], figures, words)


def rows(report: Report, figures: Mapping[str, Figure]) -> list[list[str]]:
    """Cells of the table, a row for each way."""

    def cell(way: Way, name: str) -> str:
        found = way.figures.get(name)
        return figures[name].cell(found) if found else way.words.get(name, '-')

    return [[way.title, *(cell(way, name) for name in figures)] for way in report.ways.values()]


def markdown(report: Report, figures: Mapping[str, Figure]) -> str:
    # A file of an earlier version lacks figures that came later.
    had = {name for way in report.ways.values() for name in (*way.figures, *way.words)}
    figures = {name: figure for name, figure in figures.items() if name in had}
    cells = [[title.replace('*', '\\*'), *others] for title, *others in rows(report, figures)]
    return tables.markdown(('', *(figure.heading for figure in figures.values())), cells)


def print_report(report: Report, figures: Mapping[str, Figure], console: Console) -> None:
    tables.say(console, report.hardware.line())
    columns = ['', *(f'>{figure.heading}' for figure in figures.values())]
    # At the width of a narrow terminal, rich would cut the columns.
    least = _LEAST_WIDTH + 10 * len(columns)
    wide = Console(file=console.file, width=max(console.width, least))
    wide.print(tables.table(columns, rows(report, figures)), soft_wrap=True)
    for line in report.notes:
        tables.say(console, line)
