# SPDX-License-Identifier: Apache-2.0
"""What each rank has committed in the present epoch, for others to see who holds them up."""

from torch.distributed import Store


def publish(store: Store, epoch: int, rank: int, iteration: int) -> None:
    """Let the others know the newest iteration that `rank` has committed."""
    store.set(_key(epoch, rank), str(iteration))


def furthest_behind(store: Store, epoch: int, world_size: int) -> int | None:
    """The rank that has committed less than all others; None if there is not exactly one."""
    keys = [_key(epoch, rank) for rank in range(world_size)]
    if not store.check(keys):
        return None  # somebody has not trained yet
    committed = [int(found) for found in store.multi_get(keys)]
    least = min(committed)
    return committed.index(least) if committed.count(least) == 1 and world_size > 1 else None


def _key(epoch: int, rank: int) -> str:
    return f'progress/{epoch}/{rank}'
