# SPDX-License-Identifier: Apache-2.0
"""Command line of the launcher in a Slurm batch script."""

import argparse
import math
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from moevement_ext.config import ConfigurationError
from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.events import Event
from moevement_ext.launch.allocation import RequeueState, call_before_end, go_back, hostnames
from moevement_ext.launch.command_line import (
    add_shared,
    configured,
    parse_before_program,
)
from moevement_ext.launch.launch_config import LaunchConfig
from moevement_ext.launch.output import give_up_unwritten
from moevement_ext.launch.spare import DECLARATION
from moevement_ext.launch.steps import slurm_step
from moevement_ext.system.exit_signal import stop_at_signals
from moevement_ext.system.name_lookups import ask_again_soon

_DESCRIPTION = """\
Runs a training program on the nodes of a Slurm allocation, from the batch script. A worker that
dies is replaced at once, and a lost node is replaced by a spare node; the other workers keep
running. See scripts/slurm_pretrain.sbatch.

  exec moevement slurm --spare-nodes 1 --workers-per-node 8 -- pretrain_gpt.py ...
"""
_ENDED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class _SlurmJob:
    """A parsed command line in an allocation."""

    launch: LaunchConfig
    hosts: tuple[str, ...]
    requeue: bool
    before_end_s: float | None
    step_flags: tuple[str, ...] = ()
    """Additional flags of `srun` for the agents."""
    agent_python: tuple[str, ...] = (sys.executable,)
    """Command that runs Python on the nodes."""


def parse(argv: Sequence[str]) -> _SlurmJob:
    """Parse the launcher's flags, `--`, program and its flags; ends the process on an error."""
    parser = _parser()
    args = parse_before_program(parser, argv)
    try:
        hosts = _hosts()
        if not 0 <= args.spare_nodes < len(hosts):
            raise ConfigurationError(
                f'--spare-nodes {args.spare_nodes} must be at least 0 and leave a node to train '
                f'on; the allocation has {len(hosts)}: ask for more with sbatch --nodes.'
            )
        nodes = len(hosts) - args.spare_nodes
        launch = configured(args, nodes, grace_s=args.grace)
        if args.before_end is not None and not args.before_end >= 0:
            raise ConfigurationError(f'--before-end {args.before_end} must be at least 0.')
    except ConfigurationError as error:
        parser.error(str(error))
    step_flags = tuple(shlex.split(args.step_flags))
    python = tuple(shlex.split(args.agent_python)) or (sys.executable,)
    return _SlurmJob(launch, hosts, args.requeue, args.before_end, step_flags, python)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; returns the exit status, 0 if all workers ended with 0."""
    ask_again_soon()
    job = parse(sys.argv[1:] if argv is None else argv)
    from moevement_ext.launch.hosts import SlurmStarter
    from moevement_ext.launch.outcome import print_event  # torch: too slow for --help
    from moevement_ext.launch.supervisor import Supervisor
    from moevement_ext.store.server import allow_many_connections

    allow_many_connections()
    start_step = partial(slurm_step, flags=job.step_flags, python=job.agent_python)
    starter = partial(SlurmStarter, job.hosts, start_step)
    history = RequeueState()

    def note(event: Event) -> None:
        print_event(event)
        history.note(event)

    try:
        supervisor = Supervisor(job.launch, note, starter)
    except ConfigurationError as error:
        _parser().error(str(error))
    stop_at_signals(supervisor.stop, job.launch.flags)
    if job.before_end_s is not None:
        threading.Thread(
            target=call_before_end,
            args=(os.environ['SLURM_JOB_ID'], job.before_end_s, partial(supervisor.stop, _ENDED)),
            name='slurm-end',
            daemon=True,
        ).start()
    code = supervisor.run()
    if code == EXIT_WHOLE_JOB and job.requeue:
        workers, spare = job.launch.workers_per_node, len(job.hosts) - job.launch.nodes
        go_back(history, lambda ranks: math.ceil(ranks / workers) + spare, job.launch.flags)
    give_up_unwritten()
    return code


def _hosts() -> tuple[str, ...]:
    nodes = os.environ.get('SLURM_JOB_NODELIST')
    if nodes is None:
        raise ConfigurationError(
            'SLURM_JOB_NODELIST is not set: this runs in a batch script of Slurm, such as '
            'scripts/slurm_pretrain.sbatch; moevement launch runs on one machine.'
        )
    return hostnames(nodes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='moevement slurm',
        usage='%(prog)s [flags] -- program [flags of the program]',
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add: Callable[..., object] = parser.add_argument
    number = {'type': int, 'metavar': 'N'}
    add(
        '--spare-nodes',
        **number,
        default=0,
        help='Nodes of the allocation that wait to replace lost nodes, with the program imported '
        f'if it declares {DECLARATION}. Default: 0.',
    )
    add(
        '--spares',
        **number,
        help='Hot spares on each training node: idle processes that have imported the program. If '
        'the program can be forked, one spare serves all workers. 0: none, which leaves their '
        'memory to training. Default: 1 if the program declares '
        f'{DECLARATION}, else 0.',
    )
    add(
        '--requeue',
        action='store_true',
        help='Requeue the Slurm job when a node is lost and no spare is left. The job continues '
        'from windows in the memory of the nodes that it gets again.',
    )
    add(
        '--grace',
        type=float,
        metavar='SECONDS',
        default=90.0,
        help='Time from the forwarded signal to SIGKILL of the workers. Default: %(default)s.',
    )
    add(
        '--before-end',
        type=float,
        metavar='SECONDS',
        help='End the workers this long before the time limit of the allocation, as on a signal; '
        'for commands to which Slurm sends no signal, as under salloc. Default: never.',
    )
    add(
        '--step-flags',
        default='',
        metavar='FLAGS',
        help='Additional flags of the srun that starts the agent of a node, such as '
        '"--container-image IMAGE". Default: none.',
    )
    add(
        '--agent-python',
        default='',
        metavar='COMMAND',
        help='Command that runs agents and workers on the nodes, such as "apptainer exec --nv '
        'IMAGE.sif python". Default: the Python of this launcher.',
    )
    add_shared(parser)
    return parser


if __name__ == '__main__':
    sys.exit(main())
