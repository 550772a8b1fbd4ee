# SPDX-License-Identifier: Apache-2.0
"""Gives a process that joins a running job the parameter groups that the others have.

Upstream gathers the keys of the groups of all ranks, so that a rank has groups of parameters which
only others hold, and optimizers for them, empty ones: the steps of all ranks reduce the same. A
process that joins gathers nothing.

Replaces, in `megatron.core.optimizer`: `_get_param_groups`; within it,
`torch.distributed.all_gather_object`.
Checked against megatron-core 0.19.2.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import megatron.core.optimizer as upstream
import msgspec
import torch

from moevement_ext.membership.exchange import Exchange

_Key = tuple[tuple[tuple[str, bool | int | float | str | None], ...] | None, bool]
"""What a group overrides in the optimizer's settings, and whether its parameters are experts'."""


@contextmanager
def of_all_ranks(exchange: Exchange) -> Iterator[None]:
    """Within the context, optimizers are built with the groups of all ranks of the job."""
    build, numbers = upstream._get_param_groups, count()

    def build_aligned(*args: Any, **kwargs: Any) -> Any:
        name = f'parameter-groups/{next(numbers)}'

        def gather(found: list[Any], own: list[_Key], group: Any = None) -> None:
            encoded = exchange(name, msgspec.msgpack.encode(own))
            found[:] = [msgspec.msgpack.decode(keys, type=list[_Key]) for keys in encoded]

        with _replaced(torch.distributed, 'all_gather_object', gather):
            return build(*args, **kwargs)

    with _replaced(upstream, '_get_param_groups', build_aligned):
        yield


@contextmanager
def _replaced(module: Any, name: str, by: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, by)
    try:
        yield
    finally:
        setattr(module, name, original)
