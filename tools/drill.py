# SPDX-License-Identifier: Apache-2.0
"""Entry point of the drill in `tools.chaos.drill`."""

import sys

from tools.chaos.drill import main

if __name__ == '__main__':
    sys.exit(main())
