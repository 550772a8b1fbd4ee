# SPDX-License-Identifier: Apache-2.0
"""Popularity of each expert, by the orders of the paper's appendix B (`--sparse-ckpt-order`).

Popular operators are captured last (paper, section 3.5): a conversion skips weight gradients and
update of a frozen operator, so freezing the experts with the most tokens longest saves the most
recomputation. All functions are deterministic: ranks with the same token counts reach the same
order.

'popularity' is the share of the layer's tokens. 'soft' is the share of the router's weights.
'decayed' is the share of tokens, averaged over windows with halving weights. 'capacity' is the used
part of an expert's capacity: full experts rank equal. 'fixed' uses no popularity.
"""

from collections.abc import Mapping, Sequence

from moevement_ext.config import CAPACITY, DECAYED, FIXED
from moevement_ext.plan.replanning import WindowLoad

_KEPT_OF_BEFORE = 0.5
# Number of members of a stage that publish counts, each for all its experts. Rank 0 sums them in
# every window: more members would cost it seconds and GiB in a large job, and would not improve the
# shares.
_MEMBERS_COUNTED = 8
# Minimum share of an expert at risk, relative to even shares: an expert without tokens in the
# measured cycle may have some in other cycles, so it is saved once its copy is old enough.
_LEAST_AT_RISK = 0.01


class Popularity:
    """Popularity of all experts, by one of `config.ORDERS`. One thread, on the planning rank."""

    def __init__(self, order: str) -> None:
        self._order = order
        self._before: dict[str, float] = {}

    def of(self, loads: Sequence[WindowLoad], present: Mapping[str, float]) -> dict[str, float]:
        """Popularity by expert operator; omits experts without counts.

        `loads` has every rank's measurements in one window; `present` is the popularity in
        the current plan, the initial value of 'decayed'.
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


def sampled(members: Sequence[int]) -> Sequence[int]:
    """The members of a stage that publish token counts: a few, evenly spread over all."""
    return members[:: -(-len(members) // _MEMBERS_COUNTED)]


def shares_of(loads: Sequence[WindowLoad]) -> dict[str, float]:
    """Each expert's share of its layer's tokens, over counting ranks; omits uncounted layers."""
    tokens = _summed(loads)
    layers: dict[str, float] = {}
    for name, count in tokens.items():
        layers[_layer(name)] = layers.get(_layer(name), 0) + count
    counted = {name: count for name, count in sorted(tokens.items()) if layers[_layer(name)]}
    return {name: count / layers[_layer(name)] for name, count in counted.items()}


def at_risk(
    experts: Sequence[str], shares: Mapping[str, float], ages: Mapping[str, int]
) -> dict[str, float]:
    """Tokens of each expert of a layer since its copy, `ages` iterations old.

    The unit is the layer's tokens in an iteration. An expert without a share gets an even one.
    """
    even = 1 / len(experts)
    return {
        name: max(shares.get(name, even), _LEAST_AT_RISK * even) * ages[name] for name in experts
    }


def order_by_popularity(names: Sequence[str], popularity: Mapping[str, float]) -> list[str]:
    """`names` by ascending popularity, ties in the given order.

    Names without a popularity (routers, attention, embeddings), which every token uses, come
    last, in the given order.
    """
    ranked = sorted((name for name in names if name in popularity), key=popularity.__getitem__)
    return ranked + [name for name in names if name not in popularity]


def moved(
    old: Mapping[str, float], new: Mapping[str, float], change: float, fraction: float
) -> bool:
    """True if at least `fraction` of the experts changed their share by more than `change` of it.

    Any growth from 0 counts as a change; experts that `old` lacks had no share.
    """
    before = {name: old.get(name, 0.0) for name in new}
    changed = [name for name in new if abs(new[name] - before[name]) > change * before[name]]
    return bool(new) and len(changed) >= fraction * len(new)


def _used_capacity(loads: Sequence[WindowLoad]) -> dict[str, float]:
    """Used part of each expert's capacity; `shares_of` without a capacity limit."""
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
