# SPDX-License-Identifier: Apache-2.0
"""Measures what a plan costs the first rank of a stage, who joins it, and all others.

    python -m tools.bench.planning --ranks 1024 --json planning.json

A real planner and a real store; operators are sizes alone. Seconds are those of the thread.

Exit status: 0 done, 2 a bad flag.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from torch.distributed import Store, TCPStore

from moevement_ext.membership.exchange import Exchange, leave
from moevement_ext.membership.place import Place
from moevement_ext.plan.replanning import PlanParameters
from moevement_ext.protect.planner import Planner, RankOperators, RankSummary
from moevement_ext.protect.stage_plan import handed_out, publish
from tools.lab.arguments import Parser
from tools.lab.benchmark import run_benchmark
from tools.lab.figures import Spread
from tools.lab.hardware import Hardware

_EXPERT_BYTES = (528_482_304, 88_080_384)
_OTHER_BYTES = (12_582_912, 2_097_152)
"""In full and light, of one rank."""
_OTHERS = ('router', 'rest')
_STORE_TIMEOUT = timedelta(seconds=60)
_REPEATS = 5


class Stage(msgspec.Struct, frozen=True):
    """What is planned: one of the stages of a job."""

    ranks: int
    expert_parallel: int
    layers: int
    experts: int
    """In each layer."""
    stages: int
    """How many the job has; the shares of all are published."""
    window: int

    def operators(self, rank: int) -> RankOperators:
        """Every rank has its experts and a part of all that is not an expert."""
        own = self.experts // self.expert_parallel
        first = rank % self.expert_parallel * own
        experts = [
            f'layers.{layer}.experts.{expert}'
            for layer in range(self.layers)
            for expert in range(first, first + own)
        ]
        others = [f'layers.{layer}.{part}' for layer in range(self.layers) for part in _OTHERS]
        return RankOperators(
            sizes=dict.fromkeys(experts, _EXPERT_BYTES) | dict.fromkeys(others, _OTHER_BYTES),
            kinds=dict.fromkeys(experts, 'expert') | dict.fromkeys(others, 'rest'),
            tied=[],
            always=0,
        )

    def shares(self) -> dict[str, float]:
        """Popularity of all experts of the model."""
        names = [
            f'layers.{layer}.experts.{expert}'
            for layer in range(self.layers * self.stages)
            for expert in range(self.experts)
        ]
        return dict(zip(names, np.random.default_rng(0).random(len(names)).tolist(), strict=True))


class PlanningReport(msgspec.Struct, frozen=True):
    """Everything that was found."""

    hardware: Hardware
    stage: Stage
    operators: int
    gather_s: Spread
    """Read what all ranks of the stage hold, as who joins does."""
    plan_s: Spread
    """Plan the stage by published shares, and hand that out."""
    take_s: Spread
    """Take over what was handed out."""
    shares_bytes: int
    """Published, for the first rank of each stage."""
    plan_bytes: int
    """Handed out."""


def measure(stage: Stage) -> PlanningReport:
    """Plan it some times."""
    store = TCPStore('127.0.0.1', 0, is_master=True, timeout=_STORE_TIMEOUT)
    for rank in range(stage.ranks):
        encoded = msgspec.msgpack.encode(stage.operators(rank))
        leave(store, 'operators', rank, encoded)
        summary = RankSummary(0, f'{rank:016x}', tied=False, family=rank, names=0)
        leave(store, 'ranks', rank, msgspec.msgpack.encode(summary))
    gather = [_seconds(lambda: _join(stage, store)) for _ in range(_REPEATS)]
    planner = _join(stage, store)
    plan, take = [], []
    for version in range(1, _REPEATS + 1):
        publish(store, PlanParameters(version, 0, stage.window, stage.shares()))
        plan.append(_seconds(lambda: planner.announced_plan(version, store)))  # noqa: B023
        take.append(_seconds(lambda: handed_out(store, 0, version)))  # noqa: B023
    return PlanningReport(
        hardware=Hardware.here(gpu=False),
        stage=stage,
        operators=sum(map(len, planner.announced_plan(_REPEATS, store).plan.slots)),
        gather_s=Spread.of(gather),
        plan_s=Spread.of(plan),
        take_s=Spread.of(take),
        shares_bytes=len(store.get(f'plan/{_REPEATS}')),
        plan_bytes=len(store.get(f'plan/{_REPEATS}/0')),
    )


class _Joining(Exchange):
    """Exchange of a process that joins a job of one stage."""

    def __init__(self, store: Store, ranks: int) -> None:
        super().__init__(store, joining=True)
        self._ranks = range(ranks)

    def __call__(self, name: str, own: bytes) -> list[bytes]:
        return self.among(name, own, self._ranks, None)


def _join(stage: Stage, store: Store) -> Planner:
    """The first rank, which was lost, in its next life."""
    rank = SimpleNamespace(number=0, exchange=_Joining(store, stage.ranks))
    held = SimpleNamespace(slices={}, kinds={}, tied=[])
    place = Place(0, range(stage.ranks), None, [], interleaved=False)
    return Planner(cast(Any, rank), cast(Any, held), place)


def _seconds(step: Callable[[], object]) -> float:
    began = time.thread_time()
    step()
    return time.thread_time() - began


def print_report(report: PlanningReport, console: Console) -> None:
    """For people."""
    stage = report.stage
    console.print(report.hardware.line(), highlight=False, soft_wrap=True)
    console.print(
        f'A stage of {stage.ranks} ranks with {report.operators} operators, W = {stage.window}; '
        f'seconds on the thread, median (and the range).',
        highlight=False,
        soft_wrap=True,
    )
    table = Table('', 'seconds', 'bytes')
    table.add_row('who joins reads what all hold', report.gather_s.text(3), '')
    table.add_row(
        'the first plans and hands out', report.plan_s.text(3), f'{report.shares_bytes:,}'
    )
    table.add_row('all others take it over', report.take_s.text(3), f'{report.plan_bytes:,}')
    console.print(table)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, checked; exits with a message if they are wrong."""
    parser = Parser(
        prog='python -m tools.bench.planning',
        description=__doc__,
    )
    for flag, default, text in (
        ('--ranks', 1024, 'of the stage'),
        ('--expert-parallel', 64, 'ranks that the experts of a layer are spread over'),
        ('--layers', 4, 'of the stage'),
        ('--experts', 256, 'of a layer'),
        ('--stages', 16, 'of the job'),
        ('--window', 4, 'slots'),
    ):
        parser.add_argument(flag, type=int, default=default, help=f'{text} (default: {default})')
    parser.add_argument('--json', type=Path, metavar='FILE', help='write everything here')
    args = parser.parse_args(argv)
    for name in Stage.__struct_fields__:
        if getattr(args, name) < 1:
            flag = name.replace('_', '-')
            parser.error(f'--{flag} {getattr(args, name)}: must be at least 1')
    if args.experts % args.expert_parallel:
        parser.error(
            f'--experts {args.experts}: must be a multiple of --expert-parallel '
            f'{args.expert_parallel}'
        )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    args = parse_arguments(argv)
    stage = Stage(**{name: getattr(args, name) for name in Stage.__struct_fields__})
    return run_benchmark(
        'bench_planning',
        lambda console: measure(stage),
        print_report,
        args.json,
        passed=lambda report: True,
    )


if __name__ == '__main__':
    sys.exit(main())
