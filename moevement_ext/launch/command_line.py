# SPDX-License-Identifier: Apache-2.0
"""Command line of the launcher on one machine, and the flags shared with the Slurm launcher."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from moevement_ext.config import ConfigurationError
from moevement_ext.launch.environment import default_variables_here
from moevement_ext.launch.launch_config import ANSWERS, LaunchConfig, StagedAction, StagedFault
from moevement_ext.launch.output import give_up_unwritten, say_of_launcher
from moevement_ext.launch.spare import DECLARATION, split
from moevement_ext.launch.template import fork_ahead
from moevement_ext.system.leaving import Parser, stop_at_signals
from moevement_ext.system.process_setup import ask_again_soon

_DESCRIPTION = """\
Runs a training program on emulated nodes of this machine. A worker that dies is replaced at once,
by a hot spare if one is ready; the other workers keep running. If the program has no localized
recovery, all workers restart.

  moevement launch --nodes 4 --spares 1 --kill 2@8 -- pretrain_gpt.py --sparse-ckpt ...
"""
_END = '--'


def parse(argv: Sequence[str]) -> LaunchConfig:
    """Parse the launcher's flags, `--`, program and its flags; ends the process on an error."""
    parser = _parser()
    args = parse_before_program(parser, argv)
    try:
        return configured(args, args.nodes, share_gpu=args.share_gpu)
    except ConfigurationError as error:
        parser.error(str(error))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; returns the exit status, 0 if all workers ended with 0."""
    ask_again_soon()
    config = parse(sys.argv[1:] if argv is None else argv)
    try:
        if argv is None and config.spares:  # forks end as this process does
            _fork_spare(config)
        # Slow, hence not for --help, and beside the import of the spare.
        from moevement_ext.launch.supervisor import Supervisor

        supervisor = Supervisor(config)
    except ConfigurationError as error:
        _parser().error(str(error))
    stop_at_signals(supervisor.stop, config.flags)
    code = supervisor.run()
    give_up_unwritten()
    return code


def _fork_spare(config: LaunchConfig) -> None:
    """Start the hot spare by a fork of this process once that has imported torch."""
    for name, value in default_variables_here(config).items():
        os.environ.setdefault(name, value)  # before torch, which counts its threads
    import_module('torch')
    config.make_log_dir()
    with config.log_of_spares() as log:
        fork_ahead(config.program, config.flags, os.environ, log)


def parse_before_program(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> argparse.Namespace:
    """Parse the launcher's flags; `launched` holds the program and its flags, after `--`."""
    own = list(argv[: argv.index(_END)] if _END in argv else argv)
    args = parser.parse_args(own)
    args.launched = argv[len(own) + 1 :]
    if not args.launched:
        parser.error(f'no program: put {_END}, the program and its flags after the other flags')
    return args


def configured(args: argparse.Namespace, nodes: int, **more: Any) -> LaunchConfig:
    """Build the job from the flags of both launchers and further fields of `LaunchConfig`.

    Raises `ConfigurationError`, which names the flag, if a value breaks a rule.
    """
    program = args.launched[0]
    if not Path(program).is_file():
        raise ConfigurationError(f'{program}: no such program; give the path of a file.')
    importable = _is_importable(program)
    spares = args.spares
    if spares is None:
        spares = int(importable)
        if not importable:
            say_of_launcher(f'every worker starts fresh: declare {DECLARATION} in {program}')
    elif spares and not importable:
        raise ConfigurationError(
            f'--spares {spares}: {program} does not declare {DECLARATION} (see docs/api.md): leave '
            'out this flag.'
        )
    return LaunchConfig(
        program=program,
        flags=tuple(args.launched[1:]),
        nodes=nodes,
        spares=spares,
        importable=importable,
        workers_per_node=args.workers_per_node,
        max_restarts=args.max_restarts,
        log_dir=args.log_dir,
        faults=(*args.kill, *args.kill_node, *args.lose_node, *args.return_node, *args.stop),
        when_no_spare=args.when_no_spare,
        grow_after_s=args.grow_after,
        **more,
    )


def _is_importable(program: str) -> bool:
    """True if the program declares that spares may import it; see `spare.split`."""
    try:
        return split(program) is not None
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    except (OSError, SyntaxError):  # for this Python; its workers may have another
        return False


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        'moevement launch',
        usage='%(prog)s --nodes N [flags] -- program [flags of the program]',
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    add: Callable[..., object] = parser.add_argument
    number = {'type': int, 'metavar': 'N'}
    # Of earlier versions; all workers are forks now.
    add('--fork', action='store_true', help=argparse.SUPPRESS)
    add('--nodes', **number, required=True, help='Number of emulated nodes.')
    add(
        '--share-gpu',
        action='store_true',
        help='Run all workers on the first GPU. Each is a separate host to NCCL, which then uses '
        'sockets: slow, for experiments with failures. The program needs --distributed-backend '
        'nccl --disable-gloo-process-groups. Default: one GPU per worker.',
    )
    add_shared(parser)
    return parser


def add_shared(parser: argparse.ArgumentParser) -> None:
    add: Callable[..., object] = parser.add_argument
    number = {'type': int, 'metavar': 'N'}
    add('--workers-per-node', **number, default=1, help='Ranks on each node. Default: 1.')
    add(
        '--spares',
        **number,
        help='Hot spares on each machine: processes that import the program; all workers are their '
        'forks. One is enough, unless that import starts threads or uses a GPU: then workers start '
        'fresh, and each spare can replace one. 0: none, which leaves their memory to training. '
        f'Default: 1 if the program declares {DECLARATION}, else 0.',
    )
    add(
        '--max-restarts',
        **number,
        default=LaunchConfig.max_restarts,
        help='Restarts of one rank, alone or with all others. Its next death ends the job, as do '
        'three errors of one rank within ten minutes, or of any ranks if all restart each time. '
        'Default: %(default)s.',
    )
    add(
        '--log-dir',
        type=Path,
        metavar='DIR',
        help='Append the output of each rank to DIR/rank<N>.log, and events of the launcher to '
        'DIR/launcher.jsonl, on a file system that all nodes share. Default: all output on '
        'stdout, each line prefixed with its rank.',
    )
    add(
        '--when-no-spare',
        choices=ANSWERS,
        default=LaunchConfig.when_no_spare,
        help='When a node is lost and no spare is left: guests: its ranks go on at the other '
        'nodes, with the same bits, until it is back; they share cores, GPUs and memory there. '
        'layout: all workers start again on the other nodes, in a layout that fits them; the '
        'program needs --sparse-ckpt-elastic restart, and with it goes on so if guests have no '
        'room. wait: all workers end, and start again when it is back. requeue: the job ends with '
        'exit status 75; also if its answer is not possible. Default: %(default)s.',
    )
    add(
        '--grow-after',
        type=float,
        metavar='SECONDS',
        default=LaunchConfig.grow_after_s,
        help='A job on fewer nodes is moved to nodes that are back so long. Default: %(default)g.',
    )
    group = parser.add_argument_group(
        'staged failures', 'Each strikes once the last rank has logged the iteration.'
    )
    for action, target, what in (
        (StagedAction.KILL, 'RANK', 'SIGKILL a worker.'),
        (
            StagedAction.KILL_NODE,
            'NODE',
            'SIGKILL the workers of a node and delete its memory of this run.',
        ),
        (StagedAction.LOSE_NODE, 'NODE', 'The same, and the node does not come back.'),
        (StagedAction.RETURN_NODE, 'NODE', 'A node comes back after --lose-node.'),
        (StagedAction.STOP, 'RANK', 'SIGSTOP a worker: it hangs.'),
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


def _fault(action: StagedAction, target: str, text: str) -> StagedFault:
    match = re.fullmatch(r'(\d+)@(\d+)', text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f'{text!r} must be {target}@ITERATION, two whole numbers, such as 2@8'
        )
    return StagedFault(action, int(match[1]), int(match[2]))


if __name__ == '__main__':
    sys.exit(main())
