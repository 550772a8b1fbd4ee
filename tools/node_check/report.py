# SPDX-License-Identifier: Apache-2.0
"""Findings of each rank, and problems in comparison with other ranks. No I/O."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from rich.table import Table

from tools.lab import tables

GIB = 1 << 30
_NONE = 'none'


class RankReport(msgspec.Struct, frozen=True):
    """Findings of one rank; some fields describe its node."""

    rank: int
    node: str
    versions: dict[str, str]
    """Versions by name, of software and hardware that compute."""
    variables: dict[str, str]
    """Environment variables that may decide bits."""
    memory_free_bytes: int
    """Bytes free in the node's file system for windows."""
    in_memory: bool
    """True if the node's file system for windows is a tmpfs."""
    copy_gb_s: float
    """Rate to host memory: from the rank's GPU, or within host memory without a GPU."""
    neighbour_gb_s: float | None
    """Rate to the same place on the next node, all ranks at once; None with one node only."""


def problems(reports: Sequence[RankReport], needed_bytes: int) -> list[str]:
    """Problems, one line each, by node.

    Args:
        reports: reports of all ranks.
        needed_bytes: host memory that a node needs; 0: no requirement.
    """
    nodes = first_of_each_node(reports)
    return [
        *(line for report in nodes for line in _of_a_node(report, needed_bytes)),
        *_unlike_others({report.node: report.versions for report in nodes}),
        *_unlike_others({report.node: report.variables for report in nodes}),
    ]


def first_of_each_node(reports: Iterable[RankReport]) -> list[RankReport]:
    """The report of the first rank of each node, in order of ranks."""
    nodes: dict[str, RankReport] = {}
    for report in reports:
        nodes.setdefault(report.node, report)
    return list(nodes.values())


def rates(reports: Sequence[RankReport]) -> dict[str, float]:
    """Slowest rates in GB/s, by flag of `tools.plan`.

    Copies are those of one GPU, sends those of all ranks of a node together.
    """
    found = {'--copy-bandwidth': min(report.copy_gb_s for report in reports)}
    sent: dict[str, float] = {}
    for report in reports:
        if report.neighbour_gb_s is not None:
            sent[report.node] = sent.get(report.node, 0.0) + report.neighbour_gb_s
    return found | ({'--network-bandwidth': min(sent.values())} if sent else {})


def table(reports: Sequence[RankReport]) -> Table:
    """Table for people, with the slowest rank of each node."""
    columns = ('node', '>ranks', '>free GiB', '>copy GB/s', '>next node GB/s')
    rows = []
    for first in first_of_each_node(reports):
        own = [report for report in reports if report.node == first.node]
        sent = [report.neighbour_gb_s for report in own if report.neighbour_gb_s is not None]
        rows.append((
            first.node,
            str(len(own)),
            f'{first.memory_free_bytes / GIB:.1f}',
            f'{min(report.copy_gb_s for report in own):.3g}',
            f'{min(sent):.3g}' if sent else '-',
        ))  # fmt: skip
    return tables.table(columns, rows, title='Slowest of each node', title_justify='left')


def _of_a_node(report: RankReport, needed_bytes: int) -> list[str]:
    found = []
    if not report.in_memory:
        found.append(f'{report.node}: --sparse-ckpt-dir is not in a tmpfs')
    if report.memory_free_bytes < needed_bytes:
        found.append(
            f'{report.node}: {report.memory_free_bytes / GIB:.1f} GiB are free for windows, '
            f'{needed_bytes / GIB:.1f} are needed: mount -o remount,size=... /dev/shm'
        )
    return found


def _unlike_others(by_node: dict[str, dict[str, str]]) -> list[str]:
    """Problems: values of a minority of nodes, if nodes differ."""
    found = []
    for name in sorted({name for values in by_node.values() for name in values}):
        own = {node: values.get(name, _NONE) for node, values in by_node.items()}
        ((usual, _),) = Counter(own.values()).most_common(1)
        found += [
            f'{node}: {name} is {value}, elsewhere {usual}'
            for node, value in own.items()
            if value != usual
        ]
    return found
