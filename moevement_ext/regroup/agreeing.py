# SPDX-License-Identifier: Apache-2.0
"""Agreement of all connecting ranks about the communicators that they create at once.

torch creates a communicator at the first operation of its group; most groups of a job never have
one. A member that creates it at once would wait for a member that leaves it to the first operation,
and a new process does not have the list of groups that its predecessor used. So every member
reports its used groups.
"""

from collections.abc import Collection
from datetime import timedelta

from torch.distributed import Store

_TOLD = 'in-use'
_ALL = 'in-use/all'


def used_by_any(
    store: Store, size: int, used: Collection[str], asked: Collection[str], timeout: timedelta
) -> set[str]:
    """The groups of `asked` that any member has used. Collective. Training thread.

    Costs some store requests per member, and one per group. `store` is that of this renewal;
    `used` are the groups that this process has used. Raises `RuntimeError` or `OSError` if a
    report is missing, or the wait was interrupted.
    """
    for name in set(used) & set(asked):
        store.add(f'{_TOLD}/{name}', 1)
    if store.add(_TOLD, 1) == size:
        store.add(_ALL, 1)
    store.wait([_ALL], timeout)
    return {name for name in asked if store.check([f'{_TOLD}/{name}'])}
