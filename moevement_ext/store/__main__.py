# SPDX-License-Identifier: Apache-2.0
"""Serves the store in which the ranks of a job meet, on a host that is no training node.

    moevement store --host 10.0.0.5 --port 29400

The job gets `--sparse-ckpt-store 10.0.0.5:29400`, and keeps its store when it loses a node. A child
process serves the store. If it dies, another one takes its place at once, with an empty store, and
the job restarts from windows in host memory. SIGTERM ends the program.
"""

import argparse
import sys
from collections.abc import Sequence

from moevement_ext.system import leaving
from moevement_ext.system.process_setup import ask_again_soon


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status of a process killed by the signal.

    With status 0 the program would count as completed, and Kubernetes would not replace a deleted
    pod, for example of a drained node.
    """
    ask_again_soon()
    args = parse_arguments(argv)
    from moevement_ext.store.server import (  # torch: too slow for --help
        allow_many_connections,
        keep_serving,
        listen,
    )

    allow_many_connections()
    with leaving.in_one_line():
        listening = listen(args.host, args.port)
    return 128 + keep_serving(listening, args.host)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = leaving.Parser('moevement store', description=__doc__, allow_abbrev=False)
    parser.add_argument(
        '--host',
        required=True,
        help='Name or address at which all nodes of the job can reach this host.',
    )
    parser.add_argument(
        '--port', type=int, default=29400, help='Default: %(default)s; 0: a free port.'
    )
    return parser.parse_args(argv)


if __name__ == '__main__':
    sys.exit(main())
