# SPDX-License-Identifier: Apache-2.0
"""`python -m moevement_ext.slurm`, in a batch script."""

import sys

from moevement_ext.slurm.command_line import main

sys.exit(main())
