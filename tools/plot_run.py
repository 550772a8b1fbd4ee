# SPDX-License-Identifier: Apache-2.0
r"""Plots a run that failed and recovered, and the fault-free run.

    moevement plot-run --plain plain.log --sparse sparse.log --dense-bytes 1234567 \
        --output run.png

Above: the loss of both runs over wall-clock time, with every restart of the logging rank marked.
Below: the bytes that this rank (the last) captured in each iteration, and the size of a dense
checkpoint. All data come from logs of the trainer with `--log-interval 1`. (The log does not show a
failure that the logging rank survives; `scripts/demo.sh` draws such a failure from the events, with
the activity of each pipeline stage.)
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from .lab.arguments import Parser, at_least
from .lab.errors import LabError
from .lab.plots import plot
from .lab.run_log import read_log


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog='moevement plot-run', description=__doc__)
    parser.add_argument('--plain', type=Path, required=True, help='log of the fault-free run')
    parser.add_argument('--sparse', type=Path, required=True, help='log of the recovered run')
    parser.add_argument('--dense-bytes', type=at_least(1), help='dense checkpoint of the last rank')
    parser.add_argument('--output', type=Path, required=True, help='PNG file to write')
    args = parser.parse_args(argv)
    try:
        plot(read_log(args.plain), read_log(args.sparse), args.dense_bytes, args.output)
    except LabError as error:
        print(f'plot_run: {error}', file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        print(f'plot_run: --output {args.output}: {reason}', file=sys.stderr)
        return 2
    print(args.output)
    return 0


if __name__ == '__main__':
    sys.exit(main())
