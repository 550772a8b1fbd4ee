# SPDX-License-Identifier: Apache-2.0
"""Measures protection on this machine, by one of several benchmarks.

    moevement bench overhead --json overhead.json
    moevement bench recovery --lose all
    moevement bench spare-node --rounds 3
    moevement bench guests
    moevement bench regroup
    moevement bench start

Each has its own --help.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

from ..lab.programs import Parser

BENCHMARKS = ('overhead', 'recovery', 'spare-node', 'guests', 'regroup', 'start')


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(prog='moevement bench', description=__doc__)
    parser.add_argument('benchmark', choices=BENCHMARKS, help='what is measured')
    name = parser.parse_args(given[:1]).benchmark
    return int(import_module(f'.{name.replace("-", "_")}', __package__).main(given[1:]))


if __name__ == '__main__':
    sys.exit(main())
