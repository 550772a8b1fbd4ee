#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a training program on emulated nodes of this machine; see --help.

The command `moevement launch`, for a checkout whose environment is not active.
"""

import sys
from pathlib import Path

if __name__ == '__main__':
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from moevement_ext.launch.command_line import main

    sys.exit(main())
