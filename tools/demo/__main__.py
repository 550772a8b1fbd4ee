# SPDX-License-Identifier: Apache-2.0
"""Trains twice, once undisturbed, once losing a node; shows that both end in the same bits.

    scripts/demo.sh

The job: an 8-expert GPT on 2 emulated nodes of 2 workers each, one pipeline stage a node, on real
text, on the CPU or on one GPU. In the second run the workers of the first node are killed and its
memory is deleted. Hot spares take over and replay this stage alone; the workers of the other node
live on and keep their state. Exit status 0 only if so it was and the final state of both runs is
equal, bit for bit.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tools.demo.story import Plan, run_demo
from tools.lab.arguments import Parser
from tools.lab.benchmark import exit_on_sigterm
from tools.lab.errors import LabError
from tools.lab.launch import add_share_gpu


def build_parser() -> argparse.ArgumentParser:
    """Flags of the demo."""
    parser = Parser(
        prog='scripts/demo.sh',
        description=__doc__,
    )
    parser.add_argument('--iterations', type=int, default=40, help='to train (default: 40)')
    parser.add_argument(
        '--kill-after',
        type=int,
        default=28,
        help='iteration after which the node is lost (default: 28)',
    )
    parser.add_argument('--window', type=int, default=6, help='iterations a window (default: 6)')
    parser.add_argument(
        '--output', type=Path, default=Path('runs/demo'), help='folder for data, logs and the plot'
    )
    add_share_gpu(parser)
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, checked; exits with a message if they are wrong."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.window < 1:
        parser.error(f'--window {args.window}: must be at least 1')
    if args.kill_after < 2 * args.window:
        parser.error(
            f'--kill-after {args.kill_after}: must be at least twice --window {args.window}, so '
            'that a window is complete by then'
        )
    if args.iterations <= args.kill_after + 1:
        parser.error(
            f'--iterations {args.iterations}: must be above --kill-after {args.kill_after} + 1'
        )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    args = parse_arguments(argv)
    console = Console()
    try:
        plan = Plan(args.output, args.iterations, args.kill_after, args.window, args.share_gpu)
        result = run_demo(plan, console)
    except LabError as error:
        if error.tail:
            console.rule('end of the log', style='red')
            console.print(error.tail, markup=False, highlight=False, soft_wrap=True)
            console.rule(style='red')
        console.print(f'demo: {error}', style='bold red', markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print('demo: interrupted; its processes are stopped and its memory is freed')
        return 130
    print(result.line(), flush=True)
    return 0 if result.bit_identical else 1


if __name__ == '__main__':
    exit_on_sigterm()
    sys.exit(main())
