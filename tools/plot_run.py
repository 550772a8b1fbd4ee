# SPDX-License-Identifier: Apache-2.0
r"""Plots a run that failed and recovered beside the fault-free one.

    python -m tools.plot_run --plain plain.log --sparse sparse.log --dense-bytes 1234567 \
        --output run.png

Above: the loss of both runs over wall-clock time, every restart of the logging rank marked. Below:
the bytes that this rank (the last) captured in each iteration, and what a dense checkpoint in every
iteration would take. Everything comes from the logs of the trainer, run with `--log-interval 1`. (A
failure that the logging rank survives is not in its log; `scripts/demo.sh` draws that one from the
events, with a strip that shows what each pipeline stage did meanwhile.)
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from tools.lab.arguments import Parser
from tools.lab.plots import plot
from tools.lab.run_log import LogError, read_log


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    parser = Parser(prog='python -m tools.plot_run', description=__doc__)
    parser.add_argument('--plain', type=Path, required=True, help='log of the fault-free run')
    parser.add_argument('--sparse', type=Path, required=True, help='log of the recovered run')
    parser.add_argument('--dense-bytes', type=int, help='dense checkpoint of the last rank')
    parser.add_argument('--output', type=Path, required=True, help='PNG file to write')
    args = parser.parse_args(argv)
    try:
        plot(read_log(args.plain), read_log(args.sparse), args.dense_bytes, args.output)
    except LogError as error:
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
