# SPDX-License-Identifier: Apache-2.0
"""Host memory of a job in one tmpfs per node, of exactly the planned size in bytes.

What a recovery takes beyond the plan finds no room there.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moevement_ext.memory.budget import HostMemoryPlan

VARIABLE = 'MOEVEMENT_TEST_EXACT_MEMORY'
"""Set in workers whose node has such a tmpfs."""
_UNTIL_IT_IS_KNOWN = 2**30


def mount(path: Path) -> None:
    """A tmpfs for the node whose directory this is; the test is skipped where none can be had."""
    path.mkdir(mode=0o700, parents=True)
    path.parent.chmod(0o700)
    options = f'size={_UNTIL_IT_IS_KNOWN},mode=0700'
    command = ['mount', '-t', 'tmpfs', '-o', options, 'tmpfs', str(path)]
    made = subprocess.run(command, capture_output=True)
    if made.returncode != 0:
        path.rmdir()
        pytest.skip(f'no tmpfs can be mounted here: {made.stderr.decode().strip()}')


def unmount(path: Path) -> None:
    """After the job."""
    subprocess.run(['umount', '--lazy', str(path)], check=True)


def install() -> None:
    """The first rank of a node to know its plan gives the tmpfs that size. In each worker."""
    original: Callable[..., Any] = HostMemoryPlan.check

    def check(plan: HostMemoryPlan, budget_gb: float | None, directory: Path) -> None:
        if shutil.disk_usage(directory).total == _UNTIL_IT_IS_KNOWN:
            options = f'remount,size={plan.node_total}'
            subprocess.run(['mount', '-o', options, str(directory)], check=True)
        assert shutil.disk_usage(directory).total == plan.node_total, 'a recovery has another plan'
        original(plan, budget_gb, directory)

    HostMemoryPlan.check = check


def environment() -> dict[str, str]:
    """Of the workers."""
    return {VARIABLE: '1'}


def wanted() -> bool:
    """In a worker: its node has such a tmpfs."""
    return VARIABLE in os.environ
