# SPDX-License-Identifier: Apache-2.0
"""`python -m moevement_ext.slurm`, in a batch script: see `launch/slurm.py`."""

import sys

from moevement_ext.launch.slurm import main

if __name__ == '__main__':
    sys.exit(main())
