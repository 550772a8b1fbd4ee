# SPDX-License-Identifier: Apache-2.0
"""A real Slurm cluster whose nodes all run on this machine."""
