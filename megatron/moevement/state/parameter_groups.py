# SPDX-License-Identifier: Apache-2.0
"""Gives a process that joins a running job the parameter groups that the others have.

Upstream gathers the keys of the groups of all ranks, so that a rank has groups of parameters which
only others hold, and optimizers for them, empty ones: the steps of all ranks reduce the same. A
process that joins gathers nothing.

Wraps `_get_param_groups` of `megatron.core.optimizer`, and within it replaces
`torch.distributed.all_gather_object`.
Checked against megatron-core 0.19.2.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import msgspec

from megatron.moevement.seams import patches
from moevement_ext.membership.exchange import Exchange

_Key = tuple[tuple[tuple[str, bool | int | float | str | None], ...] | None, bool]
"""What a group overrides in the optimizer's settings, and whether its parameters are experts'."""


@contextmanager
def of_all_ranks(exchange: Exchange) -> Iterator[None]:
    """Within the context, optimizers are built with the groups of all ranks of the job."""
    numbers = count()

    def build_aligned(build: Callable[..., object], *args: object, **kwargs: object) -> object:
        name = f'parameter-groups/{next(numbers)}'

        def gather(_: Any, found: list[Any], own: list[_Key], group: Any = None) -> None:
            encoded = exchange(name, msgspec.msgpack.encode(own))
            found[:] = [msgspec.msgpack.decode(keys, type=list[_Key]) for keys in encoded]

        with patches.wrapped('torch.distributed:all_gather_object', gather):
            return build(*args, **kwargs)

    with patches.wrapped('megatron.core.optimizer:_get_param_groups', build_aligned):
        yield
