# SPDX-License-Identifier: Apache-2.0
"""Command line of the launcher."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from moevement_ext.config import ConfigurationError
from moevement_ext.launch.config import Action, LaunchConfig, StagedFault
from moevement_ext.process.exit_signal import stop_at_signals
from moevement_ext.process.name_lookups import ask_again_soon

_DESCRIPTION = """\
Runs a training program on emulated nodes of this machine. A worker that dies is replaced at once,
by a hot spare if one is ready; the other workers live on. Those of a program without localized
recovery cannot: they are all started again.

  scripts/local_cluster.py --nodes 4 --spares 1 --kill 2@8 -- pretrain_gpt.py --sparse-ckpt ...
"""
_END = '--'


def parse(argv: Sequence[str]) -> LaunchConfig:
    """The job on a command line; ends the process with a message if it breaks a rule.

    Args:
        argv: flags of the launcher, `--`, program, flags of the program.
    """
    parser = _parser()
    own = list(argv[: argv.index(_END)] if _END in argv else argv)
    args = parser.parse_args(own)
    launched = argv[len(own) + 1 :]
    if not launched:
        parser.error(f'no program: put {_END}, the program and its flags after the other flags')
    try:
        return LaunchConfig(
            program=launched[0],
            flags=tuple(launched[1:]),
            nodes=args.nodes,
            workers_per_node=args.workers_per_node,
            spares=args.spares,
            fork=args.fork,
            max_restarts=args.max_restarts,
            log_dir=args.log_dir,
            faults=given_faults(args),
            share_gpu=args.share_gpu,
        )
    except ConfigurationError as error:
        parser.error(str(error))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; returns the exit status: 0 if all workers ended with 0."""
    ask_again_soon()
    config = parse(sys.argv[1:] if argv is None else argv)
    from moevement_ext.launch.supervisor import Supervisor  # torch: too slow for --help

    try:
        supervisor = Supervisor(config)
    except ConfigurationError as error:
        _parser().error(str(error))
    stop_at_signals(supervisor.stop, config.flags)
    return supervisor.run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage='%(prog)s --nodes N [flags] -- program [flags of the program]',
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add: Callable[..., object] = parser.add_argument
    number = {'type': int, 'metavar': 'N'}
    add('--nodes', **number, required=True, help='Emulated nodes.')
    add('--workers-per-node', **number, default=1, help='Ranks on each. Default: 1.')
    add(
        '--spares',
        **number,
        default=LaunchConfig.spares,
        help='Hot spares: processes that have imported the program and wait. Default: 0.',
    )
    add(
        '--fork',
        action='store_true',
        help='Import the program once and fork every worker from that process: it starts in a '
        'fraction of a second. Only if nothing that the program imports starts a thread or uses '
        'a GPU.',
    )
    add(
        '--max-restarts',
        **number,
        default=LaunchConfig.max_restarts,
        help='Replacements in all, or new starts of all workers together; the next death ends the '
        'job, as do three errors of one rank within ten minutes. Default: %(default)s.',
    )
    add(
        '--log-dir',
        type=Path,
        metavar='DIR',
        help='Append the output of each rank to DIR/rank<N>.log, and events of the launcher to '
        'DIR/launcher.jsonl. Default: all on stdout, with the rank before each line.',
    )
    add(
        '--share-gpu',
        action='store_true',
        help='All workers on the first GPU, each a host of its own to NCCL, so that they talk '
        'through sockets: slow, for trying failures. Give the program --distributed-backend nccl '
        '--disable-gloo-process-groups. Default: a GPU for each worker.',
    )
    add_faults(parser)
    return parser


def add_faults(parser: argparse.ArgumentParser) -> None:
    """The flags of failures that a launcher stages."""
    group = parser.add_argument_group(
        'staged failures', 'Each strikes once the last rank has logged the iteration.'
    )
    for action, target, what in (
        (Action.KILL, 'RANK', 'SIGKILL a worker.'),
        (
            Action.KILL_NODE,
            'NODE',
            'SIGKILL the workers of a node and delete its memory below --sparse-ckpt-dir, which '
            'needs --sparse-ckpt-run-id.',
        ),
        (Action.STOP, 'RANK', 'SIGSTOP a worker: it hangs.'),
    ):
        group.add_argument(
            action.value,
            type=partial(_fault, action, target),
            nargs='+',
            action='extend',
            default=[],
            metavar=f'{target}@ITERATION',
            help=what,
        )


def given_faults(args: argparse.Namespace) -> tuple[StagedFault, ...]:
    """Those of a command line with the flags of `add_faults`."""
    return (*args.kill, *args.kill_node, *args.stop)


def _fault(action: Action, target: str, text: str) -> StagedFault:
    match = re.fullmatch(r'(\d+)@(\d+)', text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f'{text!r} must be {target}@ITERATION, two whole numbers, such as 2@8'
        )
    return StagedFault(action, int(match[1]), int(match[2]))
