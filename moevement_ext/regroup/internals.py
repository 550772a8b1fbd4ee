# SPDX-License-Identifier: Apache-2.0
"""Private parts of torch for replacing a backend: in one place, checked before use.

torch has no public way to drop the backend of a `ProcessGroup`, and ignores a backend registered
over another of the same type. `ProcessGroup::release_resources` of libtorch drops all backends but
has no Python binding, so it is called by its symbol, after a check of the vtable that the address
belongs to a `ProcessGroup`.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Backend, ProcessGroup, Store
from torch.distributed.distributed_c10d import _world as world

from moevement_ext.errors import SparseCheckpointError

CHECKED_WITH = '2.15'
"""Version of torch that this was checked with."""
PARTS: dict[str, tuple[str, ...]] = {
    '_C._distributed_c10d': ('FakeProcessGroup', 'ProcessGroup'),
    '_C._distributed_c10d.FakeProcessGroup': ('_create_internal',),
    '_C._distributed_c10d.ProcessGroup': (
        '_device_types',
        '_get_backend',
        '_register_backend',
        '_set_default_backend',
        '_set_group_desc',
        '_set_group_name',
    ),
    'distributed.distributed_c10d._world': (
        'pg_backend_config',
        'pg_coalesce_state',
        'pg_group_ranks',
        'pg_map',
    ),
}
"""Private attributes used here, by object of torch."""

_RELEASE = '_ZN4c10d12ProcessGroup17release_resourcesEv'
_VTABLE = '_ZTVN4c10d12ProcessGroupE'
# Offset-to-top and type information precede the first function.
_VTABLE_HEADER = 2 * ctypes.sizeof(ctypes.c_void_p)


class UnsupportedTorchError(SparseCheckpointError):
    """A part of torch that regrouping needs is missing or has changed."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f'torch {torch.__version__} {what}; process groups cannot be renewed in place. '
            f'This was checked with torch {CHECKED_WITH}: install that version.'
        )


def check(parts: dict[str, tuple[str, ...]]) -> None:
    """Check that torch has all `parts`: attributes by object path below `torch`.

    Raises `UnsupportedTorchError`, which names the first missing part.
    """
    for owner, names in parts.items():
        for name in names:
            try:
                attrgetter(f'{owner}.{name}')(torch)
            except AttributeError as error:
                raise UnsupportedTorchError(f'has no {owner}.{name}') from error


class _LibTorch(NamedTuple):
    """Parts of libtorch, called by their symbols."""

    release: Callable[[int], None]
    """`ProcessGroup::release_resources` of the object at an address."""
    vtable: int
    """Address of the vtable of `ProcessGroup`."""


@cache
def libtorch() -> _LibTorch:
    """Find the symbols; raises `UnsupportedTorchError` if libtorch does not export them."""
    path = Path(torch.__file__).parent / 'lib' / 'libtorch_cpu.so'
    try:
        # Keeps the GIL, so that no Python thread sees a group without a backend.
        library = ctypes.PyDLL(str(path))
        release = library[_RELEASE]
        vtable = ctypes.addressof(ctypes.c_char.in_dll(library, _VTABLE))
    except (AttributeError, OSError, ValueError) as error:
        raise UnsupportedTorchError(
            f'does not export ProcessGroup::release_resources ({error})'
        ) from error
    release.argtypes = [ctypes.c_void_p]
    release.restype = None
    return _LibTorch(release, vtable)


def address_of(group: ProcessGroup) -> int:
    """C++ object's address, which pybind11 stores, with an equal holder, after the head.

    Raises `UnsupportedTorchError` if Python objects of process groups have another layout.
    """
    place = id(group) + object.__basicsize__
    address, holder = (ctypes.c_void_p * 2).from_address(place)
    if type(group) is not ProcessGroup or not address or address != holder:
        raise UnsupportedTorchError(f'keeps {type(group).__name__} objects in a different way')
    vtable = ctypes.c_void_p.from_address(address).value
    if vtable != libtorch().vtable + _VTABLE_HEADER:
        raise UnsupportedTorchError('has process groups of another C++ class')
    return int(address)


def install(
    group: ProcessGroup, backend: Backend, kind: str, devices: Sequence[torch.device], store: Store
) -> list[Backend]:
    """Make `backend` the only backend of `group` and update torch's tables. Training thread.

    Returns the old backends, which live as long as they are referenced; their threads are joined
    when they are destroyed. Raises `UnsupportedTorchError` if the group still uses another backend.
    `kind` is torch's name of the backend, which is connected through `store` and serves `devices`.
    """
    name, description = group.group_name, group.group_desc
    number = getattr(ProcessGroup.BackendType, 'CUSTOM' if kind == 'fake' else kind.upper())
    old = [group._get_backend(device) for device in devices]
    libtorch().release(address_of(group))
    for device in devices:
        group._register_backend(device, number, backend)
    group._set_default_backend(number)
    # Only the backends keep the name.
    group._set_group_name(name)
    group._set_group_desc(description)
    world.pg_map[group] = (kind, store)
    world.pg_backend_config[group] = ','.join(f'{device.type}:{kind}' for device in devices)
    if any(group._get_backend(device) is not backend for device in devices):
        raise UnsupportedTorchError('does not let go of the old backend of a process group')
    return old


def fake_backend(rank: int, size: int) -> Backend:
    """A backend whose collectives complete at once and leave tensors unchanged."""
    return c10d.FakeProcessGroup._create_internal(rank, size)


def forget_coalescing() -> None:
    """Reset coalescing regions that an exception has left open."""
    world.pg_coalesce_state.clear()


def groups_in_order() -> list[tuple[ProcessGroup, tuple[int, ...]]]:
    """The current process groups in order of creation, with their global ranks."""
    # Safe on any thread: torch enters the ranks of a new group last.
    groups = [(group, world.pg_group_ranks.get(group)) for group in list(world.pg_map)]
    return [(group, tuple(ranks)) for group, ranks in groups if ranks is not None]
