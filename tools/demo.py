# SPDX-License-Identifier: Apache-2.0
"""Entry point of the demo in `tools.chaos.demo`."""

import sys

from tools.chaos.demo import main

if __name__ == '__main__':
    sys.exit(main())
