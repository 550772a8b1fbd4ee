# SPDX-License-Identifier: Apache-2.0
"""Measures the accuracy of narrow formats: `tools.bench.overhead --precision all`, longer runs.

    python -m tools.bench.precision --json precision.json      # a GPU with Transformer Engine
    python -m tools.bench.precision --stand-ins                # a CPU, with stand-ins for it

Flags are those of `tools.bench.overhead`.
"""

import sys
from collections.abc import Sequence

from tools.bench import overhead
from tools.lab.benchmark import exit_on_sigterm

_LONGER = '--precision all --rounds 1 --iterations 300'.split()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status. The last value of a flag counts."""
    given = sys.argv[1:] if argv is None else argv
    return overhead.main([*_LONGER, *given], prog='python -m tools.bench.precision')


if __name__ == '__main__':
    exit_on_sigterm()
    sys.exit(main())
