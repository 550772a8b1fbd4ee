# SPDX-License-Identifier: Apache-2.0
"""Deletes the windows of a drill's jobs on all nodes: no later job continues from them."""

import argparse
import os
import shlex
import subprocess
from collections.abc import Sequence

from tools.lab.errors import LabError

_TIMEOUT_S = 120.0


def memory_roots(settings: argparse.Namespace) -> list[str]:
    """Directories of a job, by its flags, in which each run has directories of its own."""
    return [root for root in (settings.sparse_ckpt_dir, settings.sparse_ckpt_disk) if root]


def remove_memory(roots: Sequence[str], run_id: str) -> None:
    """Delete the directories of a run in all its layouts, on each node of the allocation, if any.

    Raises `LabError`, with the command to repeat, if a node cannot be reached.
    """
    places = [
        f'{shlex.quote(root)}/{part}{run_id}*' for root in roots for part in ('', '.metrics/')
    ]
    remove = f'rm -rf {" ".join(places)}'
    # All nodes delete the same directory of a shared disk; one of them may come too late.
    command = ['sh', '-c', f'{remove} || {remove}']
    if 'SLURM_JOB_NODELIST' in os.environ:
        command = ['srun', '--no-kill', '--overlap', '--ntasks-per-node=1', *command]
    try:
        subprocess.run(command, check=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise LabError(
            f'windows of {run_id} stay in host memory ({error}); delete them: {shlex.join(command)}'
        ) from error
