# SPDX-License-Identifier: Apache-2.0
"""The order in which a window captures operators: the popular last (paper, section 3.5).

While an operator is frozen during conversion its weight gradients and update are skipped, so
freezing the experts with the most tokens longest saves the most recomputation. All functions are
deterministic: ranks that know the same token counts reach the same order.
"""

from collections.abc import Mapping, Sequence

import numpy as np


def order_by_popularity(names: Sequence[str], popularity: Mapping[str, float]) -> list[str]:
    """`names` by ascending popularity, ties in the given order.

    Names without a popularity (routers, attention, embeddings) are used by every token: they come
    last, in the given order.
    """
    ranked = sorted((name for name in names if name in popularity), key=popularity.__getitem__)
    return ranked + [name for name in names if name not in popularity]


def changed_enough(
    old: np.ndarray, new: np.ndarray, *, change: float = 0.10, fraction: float = 0.25
) -> bool:
    """True if the shares have moved so far that a new order is worth planning.

    True if at least `fraction` of the experts changed their share by more than `change` of the old
    one; a share that was 0 counts as changed as soon as it is not. `old` and `new` have one shape.
    """
    if old.shape != new.shape:
        raise ValueError(f'shares of shape {old.shape} and {new.shape} cannot be compared')
    changed = np.abs(new - old) > change * old
    return bool(old.size) and int(changed.sum()) >= fraction * old.size
