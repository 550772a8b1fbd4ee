# SPDX-License-Identifier: Apache-2.0
r"""Runs a real Slurm cluster of five nodes, n1 to n5, on this machine: to try failures.

    python -m tools.local_slurm start runs/slurm
    export SLURM_CONF=$PWD/runs/slurm/slurm.conf
    sbatch --nodes=3 --gpus-per-node=1 --cpus-per-task=1 scripts/slurm_pretrain.sbatch ...
    python -m tools.local_slurm lose runs/slurm n2
    python -m tools.local_slurm stop runs/slurm

Each node has two CPUs and a fake GPU. The tool needs root, and the packages slurm-wlm and munge of
Debian or Ubuntu; its daemons listen on loopback and on free ports, beside any other Slurm. `lose`
kills all processes of a node, as a power failure does; delete its files in /dev/shm yourself.

Exit status: 0 done, 2 the command is impossible; the message says why.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.lab.arguments import Parser
from tools.lab.errors import LabError
from tools.local_slurm.cluster import NODES, LocalSlurm


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    cluster = LocalSlurm(args.folder)
    try:
        match args.command:
            case 'start':
                cluster.check()
                _start(cluster)
            case 'lose':
                killed = cluster.lose_node(args.node)
                print(f'{args.node} is lost: {killed} processes were killed')
            case 'stop':
                found = cluster.stop()
                print(f'{found} processes ended' if found else f'no cluster runs in {args.folder}')
    except LabError as error:
        print(f'local_slurm: {error}\n{error.tail}'.rstrip(), file=sys.stderr)
        return 2
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog='python -m tools.local_slurm',
        description=__doc__,
    )
    commands = parser.add_subparsers(dest='command', required=True)
    for name, about in (
        ('start', 'start a cluster in a folder'),
        ('lose', 'kill all that runs on a node'),
        ('stop', 'end daemons and jobs'),
    ):
        command = commands.add_parser(name, help=about)
        command.add_argument('folder', type=Path, metavar='DIR', help='folder of the cluster')
        if name == 'lose':
            command.add_argument('node', metavar='NODE', choices=NODES, help=', '.join(NODES))
    return parser.parse_args(argv)


def _start(cluster: LocalSlurm) -> None:
    try:
        cluster.start()
    except LabError:
        cluster.stop()
        raise
    print(f'{len(cluster.states())} nodes are idle; the commands of Slurm find them by')
    print(f'export SLURM_CONF={cluster.configuration}')


if __name__ == '__main__':
    sys.exit(main())
