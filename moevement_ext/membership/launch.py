# SPDX-License-Identifier: Apache-2.0
"""Names of launches and processes in the store, which may outlive both.

Messages of an earlier launch refer to processes that are gone. So a launcher draws a random name
for each launch, and all keys by which its processes talk to it begin with that name.
"""

import os
import secrets

from torch.distributed import PrefixStore, Store

VARIABLE = 'MOEVEMENT_LAUNCH'
"""Environment variable of workers with the name of the launch. A launcher that reads nothing from
the store, such as torchrun, does not set it."""
PROCESS = 'MOEVEMENT_PROCESS'
"""Environment variable of a worker with its number; that launcher draws it, else the worker."""


def own_launch() -> str:
    """Name of this process's launch; empty if it has none."""
    return os.environ.get(VARIABLE, '')


def own_process() -> int:
    """Number of this process: a random one, as each container counts process ids from 1."""
    return int(os.environ.setdefault(PROCESS, new_process()))


def new_process() -> str:
    return str(secrets.randbits(63))


def of_launch(store: Store, launch: str) -> Store:
    """The part of a store with the messages of a launch."""
    return PrefixStore(f'launch/{launch}', store) if launch else store
