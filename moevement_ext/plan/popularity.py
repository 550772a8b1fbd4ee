# SPDX-License-Identifier: Apache-2.0
"""How popular each expert is, in the ways of the paper's appendix B (`--sparse-ckpt-order`).

'popularity' is the share of the tokens of its layer. 'soft' is the share of the weights that its
router gives. 'decayed' is the share, averaged over windows with weights that halve. 'capacity' is
the part of its capacity that an expert uses: those that are full count alike. 'fixed' is none.
"""

from collections.abc import Mapping, Sequence

from moevement_ext.config import CAPACITY, DECAYED, FIXED
from moevement_ext.plan.replanning import WindowLoad

_KEPT_OF_BEFORE = 0.5


class Popularity:
    """Follows the popularity of all experts. On the rank that decides on plans, one thread.

    Args:
        order: one of `config.ORDERS`.
    """

    def __init__(self, order: str) -> None:
        self._order = order
        self._before: dict[str, float] = {}

    def of(self, loads: Sequence[WindowLoad], present: Mapping[str, float]) -> dict[str, float]:
        """By expert operator; of those that nothing was counted of there is none.

        Args:
            loads: what every rank saw in one window.
            present: popularity by which the plan in force was made; what 'decayed' begins with.
        """
        if self._order == FIXED:
            return {}
        if self._order == CAPACITY:
            return _used_capacity(loads)
        shares = shares_of(loads)
        if self._order == DECAYED:
            before = self._before or present
            shares = {name: _decayed(before.get(name), share) for name, share in shares.items()}
            self._before = shares
        return shares


def shares_of(loads: Sequence[WindowLoad]) -> dict[str, float]:
    """Each expert's share of the tokens of its layer, summed over ranks, if any were counted."""
    tokens = _summed(loads)
    layers: dict[str, float] = {}
    for name, count in tokens.items():
        layers[_layer(name)] = layers.get(_layer(name), 0) + count
    counted = {name: count for name, count in sorted(tokens.items()) if layers[_layer(name)]}
    return {name: count / layers[_layer(name)] for name, count in counted.items()}


def _used_capacity(loads: Sequence[WindowLoad]) -> dict[str, float]:
    """Part of what an expert takes at most; as `shares_of` where nothing limits it."""
    capacity: dict[str, float] = {}
    for load in loads:
        for name in load.tokens:
            capacity[name] = capacity.get(name, 0.0) + (load.capacity or 0.0)
    shares, tokens = shares_of(loads), _summed(loads)
    return {
        name: min(1.0, tokens[name] / capacity[name]) if capacity[name] else share
        for name, share in shares.items()
    }


def _summed(loads: Sequence[WindowLoad]) -> dict[str, float]:
    tokens: dict[str, float] = {}
    for load in loads:
        for name, count in load.tokens.items():
            tokens[name] = tokens.get(name, 0) + count
    return tokens


def _decayed(before: float | None, share: float) -> float:
    return share if before is None else _KEPT_OF_BEFORE * before + (1 - _KEPT_OF_BEFORE) * share


def _layer(name: str) -> str:
    return name.rpartition('.')[0]
