# SPDX-License-Identifier: Apache-2.0
"""Starts the workers of a job on the nodes of a Slurm allocation, and lost nodes on spare ones."""
