# SPDX-License-Identifier: Apache-2.0
"""Host memory of a job in one tmpfs per node, of exactly the planned size in bytes.

A recovery that takes more than the plan finds no space there.
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
    """Mount a tmpfs on the directory of a node; skip the test if that is impossible."""
    path.mkdir(mode=0o700, parents=True)
    path.parent.chmod(0o700)
    options = f'size={_UNTIL_IT_IS_KNOWN},mode=0700'
    command = ['mount', '-t', 'tmpfs', '-o', options, 'tmpfs', str(path)]
    made = subprocess.run(command, capture_output=True)
    if made.returncode != 0:
        path.rmdir()
        pytest.skip(f'no tmpfs can be mounted here: {made.stderr.decode().strip()}')


def unmount(path: Path) -> None:
    subprocess.run(['umount', '--lazy', str(path)], check=True)


def install() -> None:
    """In each worker: the first rank of a node with a plan resizes the tmpfs to it."""
    original: Callable[..., Any] = HostMemoryPlan.check

    def check(plan: HostMemoryPlan, budget_gb: float | None, directory: Path) -> None:
        if shutil.disk_usage(directory).total == _UNTIL_IT_IS_KNOWN:
            options = f'remount,size={plan.node_total}'
            subprocess.run(['mount', '-o', options, str(directory)], check=True)
        assert shutil.disk_usage(directory).total == plan.node_total, 'a recovery has another plan'
        original(plan, budget_gb, directory)

    HostMemoryPlan.check = check


def environment() -> dict[str, str]:
    return {VARIABLE: '1'}


def wanted() -> bool:
    """True in a worker whose node has such a tmpfs."""
    return VARIABLE in os.environ
