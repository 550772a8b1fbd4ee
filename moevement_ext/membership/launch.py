# SPDX-License-Identifier: Apache-2.0
"""Names of launches and processes in the store, which may outlive both.

Messages of an earlier launch refer to processes that are gone. So a launcher draws a random name
for each launch, and all keys by which its processes talk to it begin with that name. Likewise each
process has a random number: process ids repeat, as each container counts them from 1.
"""

import functools
import os
import secrets

from torch.distributed import PrefixStore, Store

VARIABLE = 'MOEVEMENT_LAUNCH'
"""Environment variable of workers with the name of the launch. A launcher that reads nothing from
the store, such as torchrun, does not set it."""
PROCESS = 'MOEVEMENT_PROCESS'
"""Environment variable of a worker with its number, drawn by a launcher that reads the store."""


def own_launch() -> str:
    """Name of this process's launch; empty if it has none."""
    return os.environ.get(VARIABLE, '')


def new_process() -> int:
    """Draw the number of a process."""
    return secrets.randbits(63)


def own_process() -> int:
    """Number of this process, which no other process has."""
    return int(os.environ.get(PROCESS) or _drawn(os.getpid()))


@functools.cache
def _drawn(pid: int) -> int:  # a fork has a number of its own
    return new_process()


def of_launch(store: Store, launch: str) -> Store:
    """The part of a store with the messages of a launch."""
    return PrefixStore(f'launch/{launch}', store) if launch else store
