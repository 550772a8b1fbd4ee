# SPDX-License-Identifier: Apache-2.0
"""What the processes of one launch say to their launcher, in a store that may outlive it.

A launcher draws a name for each launch. What a process of an earlier one has said, of itself or of
another, is about processes that are gone; in containers those of this launch even have the same
ids. So all such keys begin with that name.
"""

import os

from torch.distributed import PrefixStore, Store

VARIABLE = 'MOEVEMENT_LAUNCH'
"""In the environment of workers: the name of the launch. A launcher that reads nothing in the
store, as torchrun, gives none."""


def own_launch() -> str:
    """The name of the launch that this process is of; empty: it has none."""
    return os.environ.get(VARIABLE, '')


def of_launch(store: Store, launch: str) -> Store:
    """The part of a store in which the processes of a launch speak to their launcher."""
    return PrefixStore(f'launch/{launch}', store) if launch else store
