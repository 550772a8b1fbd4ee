# SPDX-License-Identifier: Apache-2.0
"""Capture order of the operators: popular operators last (paper, section 3.5).

A conversion skips weight gradients and update of a frozen operator, so freezing the experts with
the most tokens longest saves the most recomputation. All functions are deterministic: ranks with
the same token counts reach the same order.
"""

from collections.abc import Mapping, Sequence

import numpy as np


def order_by_popularity(names: Sequence[str], popularity: Mapping[str, float]) -> list[str]:
    """`names` by ascending popularity, ties in the given order.

    Names without a popularity (routers, attention, embeddings), which every token uses, come
    last, in the given order.
    """
    ranked = sorted((name for name in names if name in popularity), key=popularity.__getitem__)
    return ranked + [name for name in names if name not in popularity]


def changed_enough(
    old: np.ndarray, new: np.ndarray, *, change: float = 0.10, fraction: float = 0.25
) -> bool:
    """True if at least `fraction` of the experts changed their share by more than `change` of it.

    Any growth from 0 counts as a change. `old` and `new` have the same shape.
    """
    if old.shape != new.shape:
        raise ValueError(f'shares of shape {old.shape} and {new.shape} cannot be compared')
    changed = np.abs(new - old) > change * old
    return bool(old.size) and int(changed.sum()) >= fraction * old.size
