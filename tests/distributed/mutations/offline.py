# SPDX-License-Identifier: Apache-2.0
"""Exports that take the wrong bytes, or the wrong half of them."""

from megatron.moevement.offline import filling


def experts_swapped() -> None:
    """The records of two experts are taken for each other's."""
    names_of_shards = filling.names_of_shards
    swapped = {'layer1.expert0': 'layer1.expert1', 'layer1.expert1': 'layer1.expert0'}

    def swapping(placed, shared):
        name_of = names_of_shards(placed, shared)
        return lambda operator, tensor, owner: name_of(
            swapped.get(operator, operator), tensor, owner
        )

    filling.names_of_shards = swapping


def halves_not_interleaved() -> None:
    """The shards of a gated layer are put one behind the other."""
    joined = filling._joined
    filling._joined = lambda shards, dim, stride: joined(shards, dim, 1)


def generators_of_the_first_stage() -> None:
    """All stages get the random numbers of the first."""
    from megatron.moevement.offline import exporter

    as_upstream = exporter._as_upstream
    kept = []

    def first(state):
        kept.append(as_upstream(state))
        return kept[0]

    exporter._as_upstream = first
