# SPDX-License-Identifier: Apache-2.0
"""Gives a process that joins a running job the same parameter groups as the other ranks.

Upstream gathers the group keys of all ranks, so that a rank also has empty groups and optimizers
for parameters that only other ranks hold: all ranks then make the same reductions in a step. A
joining process cannot gather.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import msgspec

from megatron.moevement.seams import patches
from moevement_ext.membership.exchange import Exchange

# The settings that a group overrides in the optimizer, and whether its parameters are experts'.
_Key = tuple[tuple[tuple[str, bool | int | float | str | None], ...] | None, bool]


_KEYS = msgspec.msgpack.Decoder(list[_Key])


@contextmanager
def of_all_ranks(exchange: Exchange) -> Iterator[None]:
    """Build optimizers within the context with the groups of all ranks of the job."""
    numbers = count()

    def build_aligned(build: Callable[..., object], *args: object, **kwargs: object) -> object:
        name = f'parameter-groups/{next(numbers)}'

        def gather(_: Any, found: list[Any], own: list[_Key], group: Any = None) -> None:
            encoded = exchange(name, msgspec.msgpack.encode(own))
            found[:] = [_KEYS.decode(keys) for keys in encoded]

        with patches.wrapped('torch.distributed:all_gather_object', gather):
            return build(*args, **kwargs)

    with patches.wrapped('megatron.core.optimizer:_get_param_groups', build_aligned):
        yield
