#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a training program on emulated nodes of this machine; see --help.

scripts/local_cluster.py --nodes N [flags] -- pretrain_gpt.py <flags of the program>
"""

import sys
from pathlib import Path

if __name__ == '__main__':
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from moevement_ext.launch.command_line import main

    sys.exit(main())
