# SPDX-License-Identifier: Apache-2.0
"""What each rank found on its node, and what is wrong with that beside all others: no I/O here."""

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

import msgspec
from rich.table import Table

GIB = 1 << 30


class RankReport(msgspec.Struct, frozen=True):
    """What one rank found; of the node it is on where that is said."""

    rank: int
    node: str
    versions: dict[str, str]
    """Versions on the node, by name: driver, torch, NCCL, kernel, ..."""
    memory_free_bytes: int
    """Bytes free in the node's file system of windows."""
    in_memory: bool
    """Whether the node's file system of windows is a tmpfs."""
    copy_gb_s: float
    """To host memory: from the GPU of the rank, or within host memory without one."""
    neighbour_gb_s: float | None
    """To the same place on the next node, all ranks at once; None: there is one node only."""
    all_reduce_gb_s: float
    """Bytes of the tensor over seconds, all ranks together."""
    clock_mhz: int | None
    """Clock of the rank's GPU under load; None without a GPU."""
    devices: list[str]
    """What is wrong with GPUs of the node."""


class Rules(NamedTuple):
    """What a node must have."""

    needed_bytes: int
    """Host memory a node; 0: any."""
    slowest: float
    """Share of the median over all ranks that each must reach."""


_RATES: tuple[tuple[str, str, Callable[[RankReport], float | None]], ...] = (
    ('copies to host memory', 'GB/s', lambda report: report.copy_gb_s),
    ('sends to the next node', 'GB/s', lambda report: report.neighbour_gb_s),
    ('all-reduce', 'GB/s', lambda report: report.all_reduce_gb_s),
    ('clock', 'MHz', lambda report: report.clock_mhz),
)


def problems(reports: Sequence[RankReport], rules: Rules) -> list[str]:
    """One line for each thing that is wrong, by node."""
    nodes = first_of_each_node(reports)
    found = [line for report in nodes for line in _of_a_node(report, rules)]
    found += _other_versions(nodes)
    for what, unit, rate in _RATES:
        found += _slow(reports, what, unit, rate, rules.slowest)
    return found


def first_of_each_node(reports: Iterable[RankReport]) -> list[RankReport]:
    """The report of the first rank of each node, in order of ranks."""
    nodes: dict[str, RankReport] = {}
    for report in reports:
        nodes.setdefault(report.node, report)
    return list(nodes.values())


def table(reports: Sequence[RankReport]) -> Table:
    """For people: the slowest of each node."""
    shown = Table(title='Slowest of each node', title_justify='left')
    columns = ('node', 'ranks', 'free GiB', 'copy GB/s', 'next node GB/s', 'all-reduce GB/s', 'MHz')
    for column in columns:
        shown.add_column(column, justify='left' if column == 'node' else 'right')
    for first in first_of_each_node(reports):
        own = [report for report in reports if report.node == first.node]
        slowest = [_least(map(rate, own)) for _, _, rate in _RATES]
        free = f'{first.memory_free_bytes / GIB:.1f}'
        shown.add_row(first.node, str(len(own)), free, *map(_shown, slowest))
    return shown


def _of_a_node(report: RankReport, rules: Rules) -> list[str]:
    found = [f'{report.node}: GPU {what}' for what in report.devices]
    if not report.in_memory:
        found.append(f'{report.node}: --sparse-ckpt-dir is not in a tmpfs')
    if report.memory_free_bytes < rules.needed_bytes:
        found.append(
            f'{report.node}: {report.memory_free_bytes / GIB:.1f} GiB are free for windows, '
            f'{rules.needed_bytes / GIB:.1f} are needed: mount -o remount,size=... /dev/shm'
        )
    return found


def _other_versions(nodes: Sequence[RankReport]) -> list[str]:
    """Problems: versions that few nodes have, where not all nodes have the same."""
    found = []
    for name in sorted({name for report in nodes for name in report.versions}):
        counts: dict[str, int] = {}
        for report in nodes:
            version = report.versions.get(name, 'none')
            counts[version] = counts.get(version, 0) + 1
        usual = max(counts, key=lambda version: counts[version])
        found += [
            f'{report.node}: {name} is {report.versions.get(name, "none")}, elsewhere {usual}'
            for report in nodes
            if report.versions.get(name, 'none') != usual
        ]
    return found


def _slow(
    reports: Sequence[RankReport],
    what: str,
    unit: str,
    rate: Callable[[RankReport], float | None],
    slowest: float,
) -> list[str]:
    rates = [(report, found) for report in reports if (found := rate(report)) is not None]
    usual = median(found for _, found in rates) if rates else 0.0
    return [
        f'{report.node}: {what} of rank {report.rank}: {_shown(found)} {unit}, '
        f'below {slowest:.0%} of the median {_shown(usual)}'
        for report, found in rates
        if found < slowest * usual
    ]


def _least(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return min(known) if known else None


def _shown(value: float | None) -> str:
    return '-' if value is None else f'{value:.0f}' if value >= 100 else f'{value:.2f}'
