# SPDX-License-Identifier: Apache-2.0
"""Which communicators are made at once, agreed upon by all that connect together.

torch makes a communicator with the first operation of its group; most groups of a job never have
one. A member that made it at once would wait for one that leaves it to that operation, and a new
process does not know what the one before it has used. So all of them tell.
"""

from collections.abc import Collection
from datetime import timedelta

from torch.distributed import Store

_TOLD = 'in-use'
_ALL = 'in-use/all'


def used_by_any(
    store: Store, size: int, used: Collection[str], asked: Collection[str], timeout: timedelta
) -> set[str]:
    """Those of `asked` that a member has used. Training thread; all members call it together.

    Some requests a member, and one a group.

    Args:
        store: of this renewal.
        size: number of members.
        used: names of groups that this process has used.
        asked: names of its groups that are to be connected.
        timeout: for the others to tell.

    Raises:
        RuntimeError, OSError: they did not, or this was interrupted.
    """
    for name in set(used) & set(asked):
        store.add(f'{_TOLD}/{name}', 1)
    if store.add(_TOLD, 1) == size:
        store.add(_ALL, 1)
    store.wait([_ALL], timeout)
    return {name for name in asked if store.check([f'{_TOLD}/{name}'])}
