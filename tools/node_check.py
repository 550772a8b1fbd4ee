# SPDX-License-Identifier: Apache-2.0
r"""Checks before a long run that all nodes of an allocation are alike.

    sbatch scripts/slurm_nccl_check.sbatch <flags of pretrain_gpt.py>
    torchrun --nproc-per-node 8 -m tools.node_check --need-gib 300
    torchrun --nproc-per-node 8 -m tools.node_check -- --num-layers 32 --hidden-size 4096 ...

One process for each GPU, or any number without GPUs. The tool compares everything that affects
bits: versions of software (Transformer Engine and Apex included, or their absence), GPUs and
driver, environment variables; and the free memory for windows. With flags of Megatron after `--`,
the tool computes the memory that their plan needs on a node, as `python -m tools.plan` does; if the
flags are not sufficient, a line lists the missing values. It also measures the rates that a plan
needs, and prints them as flags of `tools.plan`.

Exit status: 0 no problem, 1 problems, 2 the check failed.
"""

import argparse
import dataclasses
import math
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from os import environ
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed import DistError, TCPStore

from megatron.moevement.job import computing
from moevement_ext.config import SparseCheckpointConfig, node_name
from moevement_ext.memory.cgroup import memory_left
from moevement_ext.memory.file_system import is_in_memory
from tools.lab import tables
from tools.lab.arguments import Parser, split_at_end
from tools.lab.errors import LabError
from tools.lab.trainer_flags import value_of
from tools.plan.__main__ import job_from
from tools.plan.__main__ import parse_arguments as parse_plan
from tools.plan.flags import parse_megatron_flags
from tools.plan.planning import plan_job

_END = '--'
_MIB = 1 << 20
_DIRECTORY = '--sparse-ckpt-dir'


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
    """Problems, one line each, by node. A node needs `needed_bytes` of host memory."""
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


_TORCHRUN = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')
_SLURM = ('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_LOCALID')


class Place(NamedTuple):
    """Rank of a process, and the rendezvous of all processes."""

    rank: int
    ranks: int
    local_rank: int
    host: str
    """Host of the rendezvous."""
    port: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> 'Place':
        """Read the place from environment variables.

        Raises:
            LabError: the variables are missing.
        """
        for names in (_TORCHRUN, _SLURM):
            if all(name in environment for name in (*names, 'MASTER_ADDR', 'MASTER_PORT')):
                rank, ranks, local_rank = (int(environment[name]) for name in names)
                host, port = environment['MASTER_ADDR'], int(environment['MASTER_PORT'])
                return cls(rank, ranks, local_rank, host, port)
        raise LabError(
            f'{", ".join(_TORCHRUN)}, MASTER_ADDR and MASTER_PORT are not set: start this with '
            'torchrun, or by scripts/slurm_nccl_check.sbatch'
        )


def meet(place: Place, timeout_s: float) -> tuple[TCPStore, list[str]]:
    """Join the rendezvous; returns its store, and the node of each rank.

    Raises:
        LabError: ranks did not join in time; the message names them.
    """
    try:
        store = TCPStore(
            place.host, place.port, is_master=place.rank == 0 and not _agent_has_it(),
            timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
        )  # fmt: skip
        store.set(_key(place.rank), _node())
    except DistError as error:
        raise LabError(f'{_node()} does not reach {place.host}:{place.port}: {error}') from error
    deadline = time.monotonic() + timeout_s
    missing = list(range(place.ranks))
    while missing := [rank for rank in missing if not store.check([_key(rank)])]:
        if time.monotonic() > deadline:
            raise LabError(
                f'ranks {missing[:8]} of {place.ranks} did not join within {timeout_s:.0f} s: '
                'see the log of their nodes'
            )
        time.sleep(0.1)
    return store, [node.decode() for node in store.multi_get(list(map(_key, range(place.ranks))))]


def _node() -> str:
    """Name of this node in the run."""
    return os.environ.get('SLURMD_NODENAME') or node_name()


def _agent_has_it() -> bool:
    """True if torchrun's agent serves the store at that port."""
    return os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True'


def _key(rank: int) -> str:
    return f'node-check/{rank}'


_REPEATS = 5


def memory(directory: Path) -> tuple[int, bool]:
    """Bytes that are free for windows, and whether the file system is in memory."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    free, left = shutil.disk_usage(there).free, memory_left()
    in_memory = is_in_memory(there)
    return free if left is None or not in_memory else min(free, left.nbytes), in_memory


class Meter:
    """Measures rates on one rank, with all ranks at once, as windows will use the links.

    Each transfer has `size` bytes; `nodes` has the node of each rank.
    """

    def __init__(self, device: torch.device, size: int, nodes: list[str]) -> None:
        self._device = device
        self._nodes = nodes
        self._rank = dist.get_rank()
        self._tensor = torch.ones(size, dtype=torch.uint8, device=device)

    def copy(self) -> float:
        """GB/s to host memory; all ranks at once."""
        gpu = self._device.type == 'cuda'
        host = torch.empty_like(self._tensor, device='cpu', pin_memory=gpu)
        return self._rate(lambda: host.copy_(self._tensor, non_blocking=True))

    def neighbour(self) -> float | None:
        """GB/s from this rank to the same place on the next node; None with one node only."""
        places: dict[str, list[int]] = {}
        for rank, node in enumerate(self._nodes):
            places.setdefault(node, []).append(rank)
        if len(places) == 1:
            return None
        node = self._nodes[self._rank]
        order, place = list(places), places[node].index(self._rank)
        here = order.index(node)
        to, source = (places[order[(here + step) % len(order)]] for step in (1, -1))
        received = torch.empty_like(self._tensor)

        def exchange() -> None:
            operations = []
            if place < len(to):
                operations.append(dist.P2POp(dist.isend, self._tensor, to[place]))
            if place < len(source):
                operations.append(dist.P2POp(dist.irecv, received, source[place]))
            for work in dist.batch_isend_irecv(operations) if operations else []:
                work.wait()

        return self._rate(exchange)

    def _rate(self, act: Callable[[], object]) -> float:
        """GB/s, median of several transfers; the first ones, which connect, are dropped."""
        act()
        seconds = []
        for _ in range(_REPEATS):
            dist.barrier()
            self._settle()
            began = time.perf_counter()
            act()
            self._settle()
            seconds.append(time.perf_counter() - began)
        return self._tensor.numel() / 1e9 / sorted(seconds)[_REPEATS // 2]

    def _settle(self) -> None:
        if self._device.type == 'cuda':
            torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> int:
    own, flags = _split(list(sys.argv[1:] if argv is None else argv))
    args = _parser().parse_args(own)
    parse_megatron_flags(flags)  # exits if a value is wrong
    try:
        place = Place.of(environ)
        directory = args.dir or value_of(flags, _DIRECTORY) or SparseCheckpointConfig.dir
        reports = _check(place, args, Path(directory))
    except (LabError, ValueError) as error:
        print(f'node_check: {error}', file=sys.stderr)
        return 2
    needed, unknown = _needed_bytes(args, flags, reports)
    found = problems(reports, needed)
    if place.rank == 0:
        _print(reports, found, unknown)
    return 1 if found else 0


def _split(given: list[str]) -> tuple[list[str], list[str]]:
    """Split own flags and those of Megatron; `torchrun` drops a `--` right after the module."""
    known = [flag for action in _parser()._actions for flag in action.option_strings]
    if given and _END not in given and given[0].partition('=')[0] not in known:
        return [], given
    return split_at_end(given)


def _check(place: Place, args: argparse.Namespace, directory: Path) -> list[RankReport]:
    """Measure together with all ranks; returns the reports of all, by rank."""
    gpu = torch.cuda.is_available()
    device = torch.device('cuda', place.local_rank) if gpu else torch.device('cpu')
    if gpu:
        torch.cuda.set_device(device)
    store, nodes = meet(place, args.timeout)
    dist.init_process_group(
        'nccl' if gpu else 'gloo',
        store=dist.PrefixStore('node-check-groups', store),
        rank=place.rank,
        world_size=place.ranks,
        timeout=timedelta(seconds=args.timeout),
    )
    try:
        meter = Meter(device, args.mib * _MIB, nodes)
        free, in_memory = memory(directory)
        own = RankReport(
            rank=place.rank,
            node=nodes[place.rank],
            versions=computing.versions(on_cpu=not gpu),
            variables=computing.environment(),
            memory_free_bytes=free,
            in_memory=in_memory,
            copy_gb_s=meter.copy(),
            neighbour_gb_s=meter.neighbour(),
        )
        everyone: list[bytes] = [b''] * place.ranks
        dist.all_gather_object(everyone, msgspec.json.encode(own))
    except RuntimeError as error:
        raise LabError(f'rank {place.rank} on {nodes[place.rank]}: {error}') from error
    finally:
        dist.destroy_process_group()
    return [msgspec.json.decode(report, type=RankReport) for report in everyone]


def _needed_bytes(
    args: argparse.Namespace, flags: Sequence[str], reports: Sequence[RankReport]
) -> tuple[int, str | None]:
    """Bytes of host memory that each node needs, and the reason if the plan's bytes are unknown."""
    given = int(args.need_gib * GIB)
    if not flags:
        return given, None
    try:
        return _planned_bytes(args.spare_nodes, flags, reports), None
    except ValueError as error:
        return given, str(error)


def _planned_bytes(spare_nodes: int, flags: Sequence[str], reports: Sequence[RankReport]) -> int:
    """Bytes that the plan needs on a node. Raises ValueError if the flags cannot be planned."""
    nodes = len({report.node for report in reports})
    if spare_nodes >= nodes:
        raise ValueError(f'--spare-nodes {spare_nodes} leaves no node to train on')
    on_each = len(reports) // nodes
    ranks = (nodes - spare_nodes) * on_each
    # The time of an iteration does not matter: memory is reserved for the longest window that the
    # node with the least has room for.
    own = ['--gpus', str(ranks), '--iteration-time', '60']
    job = job_from(*parse_plan([*own, _END, *flags]))
    free = max(1, min(report.memory_free_bytes for report in reports))
    cluster = dataclasses.replace(job.cluster, gpus_per_node=on_each, host_memory_bytes=free)
    return plan_job(dataclasses.replace(job, cluster=cluster)).host_memory().node_total


def _print(reports: Sequence[RankReport], found: Sequence[str], unknown: str | None) -> None:
    console = Console()
    console.print(table(reports))
    for line in found:
        console.print(line, style='bold red', markup=False, soft_wrap=True)
    if unknown is not None:
        line = (
            f'not checked: the memory that the flags need, since they cannot be planned: {unknown}'
        )
        console.print(line, style='yellow', markup=False, soft_wrap=True)
    flags = ' '.join(f'{flag} {rate:.3g}' for flag, rate in rates(reports).items())
    console.print(f'measured, as flags of tools.plan: {flags}', highlight=False, soft_wrap=True)
    nodes = len({report.node for report in reports})
    console.print(f'{nodes} nodes, {len(reports)} ranks: {len(found)} problems')


def _gib(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f'{text}: give a finite number, 0 or more')
    return value


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog='python -m tools.node_check',
        description=__doc__,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add('--need-gib', type=_gib, default=0.0, metavar='N', help='host memory that a node needs')
    add('--spare-nodes', type=int, default=0, metavar='N', help='spare nodes (default: 0)')
    add(
        '--dir', metavar='DIR',
        help='--sparse-ckpt-dir of the run (default: that of the flags, else its default)',
    )  # fmt: skip
    add('--mib', type=int, default=256, metavar='N', help='size of each transfer (default: 256)')
    add(
        '--timeout', type=float, default=300.0, metavar='S',
        help='seconds for the rendezvous, and for each transfer (default: 300)',
    )  # fmt: skip
    return parser


if __name__ == '__main__':
    sys.exit(main())
