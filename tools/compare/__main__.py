# SPDX-License-Identifier: Apache-2.0
"""Compares ways to survive failures: `moevement compare`, and `moevement compare peers`."""

import sys
from collections.abc import Sequence

from . import peers, strategies


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ['peers']:
        return peers.main(given[1:])
    return strategies.main(given)


if __name__ == '__main__':
    sys.exit(main())
