# SPDX-License-Identifier: Apache-2.0
"""Keys by which the processes of one launch talk to their launcher; the store may outlive it.

Messages of an earlier launch refer to processes that are gone; in containers, new processes even
have the same ids. So a launcher draws a random name for each launch, and all such keys begin with
it.
"""

import os

from torch.distributed import PrefixStore, Store

VARIABLE = 'MOEVEMENT_LAUNCH'
"""Environment variable of workers with the name of the launch. A launcher that reads nothing from
the store, such as torchrun, does not set it."""


def own_launch() -> str:
    """Name of this process's launch; empty if it has none."""
    return os.environ.get(VARIABLE, '')


def of_launch(store: Store, launch: str) -> Store:
    """The part of a store with the messages of a launch."""
    return PrefixStore(f'launch/{launch}', store) if launch else store
