# SPDX-License-Identifier: Apache-2.0
"""The program behind `scripts/test.sh`: runs all phases, or the tests that its arguments name."""

import argparse
import subprocess
import sys

from tests.suite import phases, selection, shards
from tests.suite.sessions import PYTEST, session


def main(argv: list[str]) -> int:
    """Return the exit status: 0 if all tests pass."""
    parser = argparse.ArgumentParser(
        prog='scripts/test.sh',
        usage='%(prog)s [flags] [folder or file of tests ...] [options of pytest]',
        allow_abbrev=False,
    )
    parser.add_argument(
        '--thorough', action='store_true', help='also nearly redundant cases, and campaigns'
    )
    parser.add_argument('--shard', type=shards.Shard.parse, metavar='I/N', help='one of N parts')
    parser.add_argument('--record', action='store_true', help='write the durations of test files')
    args, names = parser.parse_known_args(argv)
    if not names:
        return phases.run_all(phases.Plan(args.thorough, args.shard, args.record))
    options = ['--thorough'] * args.thorough
    options += [f'--shard={args.shard}'] * (args.shard is not None)
    options += selection.with_paths(names)
    if not args.record:
        return subprocess.call([*PYTEST, *options])
    result = session('named', options)
    shards.record(result.outcomes)
    return int(bool(result.red))


if __name__ == '__main__':
    try:
        sys.exit(main(sys.argv[1:]))
    except (selection.UnknownName, KeyboardInterrupt) as error:
        sys.exit(f'scripts/test.sh: {error or "interrupted"}')
