# SPDX-License-Identifier: Apache-2.0
r"""Writes one page about a run, from its events (`--sparse-ckpt-events`).

    moevement report runs/events -o report.html

The page has the activity of each rank, the use of time (effective training time ratio), each
failure with the phases and verification of its recovery, host memory and slots. The page is
self-contained: no network, no script. For a running job it shows the present state.

Exit status: 0 done, 2 there is nothing to report, or the page cannot be written.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from ..lab.arguments import Parser
from ..lab.errors import LabError
from ..lab.figures import replacing
from ..lab.history import read_history
from .page import render


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog='moevement report', description=__doc__)
    parser.add_argument('events', type=Path, help='folder of --sparse-ckpt-events')
    parser.add_argument('-o', '--output', type=Path, required=True, help='HTML file to write')
    parser.add_argument('--title', help='name of the run (default: the folder)')
    args = parser.parse_args(argv)
    try:
        page = render(read_history(args.events), args.title or str(args.events))
        with replacing(args.output) as partial:
            partial.write_text(page, 'utf-8')
    except LabError as error:
        print(f'report: {error}', file=sys.stderr)
        return 2
    except OSError as error:
        print(f'report: --output {args.output}: {error.strerror}', file=sys.stderr)
        return 2
    print(args.output)
    return 0


if __name__ == '__main__':
    sys.exit(main())
