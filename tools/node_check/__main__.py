# SPDX-License-Identifier: Apache-2.0
r"""Checks all nodes of an allocation before a long run: are all alike?

    sbatch scripts/slurm_nccl_check.sbatch <flags of pretrain_gpt.py>
    torchrun --nproc-per-node 8 -m tools.node_check --need-gib 300
    torchrun --nproc-per-node 8 -m tools.node_check -- --num-layers 32 --hidden-size 4096 ...

One process for each GPU, or any number without GPUs. The tool compares all that decides bits:
versions of software (Transformer Engine and Apex included, or their absence), GPUs and driver,
environment variables; and the free memory for windows. With flags of Megatron after `--`, the tool
computes the memory that their plan needs on a node, as `python -m tools.plan` does; if the flags
are not sufficient, a line lists the missing values. It also measures the rates that a plan needs,
and prints them as flags of `tools.plan`.

Exit status: 0 no problem, 1 problems, 2 the check failed.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from datetime import timedelta
from os import environ
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console

from megatron.moevement.job import computing
from moevement_ext.config import SparseCheckpointConfig
from tools.chaos.drill_flags import value_of
from tools.lab.arguments import Parser
from tools.lab.errors import LabError
from tools.node_check import node
from tools.node_check.place import Place, meet
from tools.node_check.report import GIB, RankReport, problems, rates, table
from tools.plan.__main__ import job_from
from tools.plan.__main__ import parse_arguments as parse_plan
from tools.plan.flags import parse_megatron_flags
from tools.plan.planning import plan_job

_END = '--'
_MIB = 1 << 20
_DIRECTORY = '--sparse-ckpt-dir'
_LAG = '--sparse-ckpt-log-lag'


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
    own = given[: given.index(_END)] if _END in given else given
    return own, given[len(own) + 1 :]


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
        meter = node.Meter(device, args.mib * _MIB, nodes)
        free, in_memory = node.memory(directory)
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
    """Bytes of host memory that each node needs, and the reason if the plan's are unknown."""
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
    # Memory is reserved for the longest window, regardless of the time of an iteration.
    lag = [] if any(_LAG in flag for flag in flags) else ['--log-lag', '1']
    own = ['--gpus', str(ranks), '--iteration-time', '60', *lag]
    job = job_from(*parse_plan([*own, _END, *flags]))
    cluster = dataclasses.replace(job.cluster, gpus_per_node=on_each)
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


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog='python -m tools.node_check',
        description=__doc__,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add('--need-gib', type=float, default=0.0, metavar='N', help='host memory that a node needs')
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
