# SPDX-License-Identifier: Apache-2.0
"""Compares the final states of two runs, bit for bit, and lists differences.

    moevement compare-digests a.json b.json

The files are those of `--sparse-ckpt-digest`. Exit status: 0 equal, 1 different, 2 a file cannot be
read.
"""

import sys
from collections.abc import Sequence

from rich.console import Console

from .lab.digests import compare, differences, read_digest
from .lab.figures import print_json
from .lab.programs import LabError, program

_ONLY_GENERATORS = (
    'Only states of random number generators differ; weights and optimizers are equal. A generator '
    'that the program never seeds begins with another state in each run: seed those of torch, '
    'random and numpy before training.'
)


def main(argv: Sequence[str] | None = None) -> int:
    args = program('compare-digests', __doc__).parse_args(argv)
    try:
        first, second = read_digest(args.first), read_digest(args.second)
    except LabError as error:
        print(f'compare_digests: {error}', file=sys.stderr)
        return 2
    if args.json:
        found = differences(first, second)
        print_json({'equal': not found, 'differences': [one._asdict() for one in found]})
        return int(bool(found))
    if kinds := compare(Console(), first, second):
        if kinds == ['rng']:
            Console().print(_ONLY_GENERATORS, highlight=False)
        return 1
    entries = sum(map(len, first.ranks.values()))
    print(f'equal: {entries} digests of {len(first.ranks)} ranks after iteration {first.iteration}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
