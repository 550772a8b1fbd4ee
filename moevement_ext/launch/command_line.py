# SPDX-License-Identifier: Apache-2.0
"""Command line of the launcher on one machine, and the flags shared with the Slurm launcher."""

import argparse
import os
import re
import sys
import tomllib
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from moevement_ext.config import ConfigurationError
from moevement_ext.launch.environment import default_variables_here
from moevement_ext.launch.launch_config import LaunchConfig, StagedAction, StagedFault
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
_TYPES = {'int': int, 'float': float, 'path': Path}


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
        layout_after_s=args.layout_after,
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
    # Of earlier versions; all workers are forks now.
    parser.add_argument('--fork', action='store_true', help=argparse.SUPPRESS)
    add_flags(parser, 'launch')
    return parser


def add_flags(parser: argparse.ArgumentParser, launcher: str) -> None:
    """Add the flags of one launcher, `launch` or `slurm`, and those of both."""
    known = tomllib.loads(files(__package__).joinpath('flags.toml').read_text('utf-8'))
    for flag, options in {**known[launcher], **known['both']}.items():
        options['help'] = options['help'].format(declaration=DECLARATION)
        options['type'] = _TYPES.get(options.get('type'))
        parser.add_argument(flag, **{name: one for name, one in options.items() if one is not None})
    group = parser.add_argument_group(
        'staged failures', 'Each strikes once the last rank has logged the iteration.'
    )
    for flag, options in known['staged failures'].items():
        kind = partial(_fault, StagedAction(flag), options['metavar'])
        group.add_argument(flag, type=kind, nargs='+', action='extend', default=[], **options)
    parser.set_defaults(
        max_restarts=LaunchConfig.max_restarts,
        when_no_spare=LaunchConfig.when_no_spare,
        layout_after=LaunchConfig.layout_after_s,
        grow_after=LaunchConfig.grow_after_s,
    )


def _fault(action: StagedAction, target: str, text: str) -> StagedFault:
    match = re.fullmatch(r'(\d+)@(\d+)', text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f'{text!r} must be {target}, two whole numbers, such as 2@8'
        )
    return StagedFault(action, int(match[1]), int(match[2]))


if __name__ == '__main__':
    sys.exit(main())
