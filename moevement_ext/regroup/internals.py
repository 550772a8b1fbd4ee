# SPDX-License-Identifier: Apache-2.0
"""The private parts of torch that replacing a backend needs: in one place, checked before use.

torch has no public way to drop the backend of a `ProcessGroup`, and a backend registered over
another of the same type is ignored. `ProcessGroup::release_resources` of libtorch drops them all
but has no Python binding, so it is called by its symbol; that the address is that of a
`ProcessGroup` is verified by its vtable first.
"""

import ctypes
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import torch
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Backend, ProcessGroup, Store
from torch.distributed.distributed_c10d import _world as world

from moevement_ext.errors import SparseCheckpointError

CHECKED_WITH = '2.15'
"""Version of torch."""
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
"""What is used of each object of torch besides public parts."""

_RELEASE = '_ZN4c10d12ProcessGroup17release_resourcesEv'
_VTABLE = '_ZTVN4c10d12ProcessGroupE'
# Offset to the top and type information, before the first function.
_VTABLE_HEADER = 2 * ctypes.sizeof(ctypes.c_void_p)


class UnsupportedTorchError(SparseCheckpointError):
    """This version of torch lacks, or has changed, a part that regrouping needs."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f'torch {torch.__version__} {what}; process groups cannot be renewed in place. '
            f'This was checked with torch {CHECKED_WITH}: install that version.'
        )


def check(parts: dict[str, tuple[str, ...]]) -> None:
    """See that torch has all `parts`: attributes of each object, named from `torch` on.

    Raises:
        UnsupportedTorchError: names the first that is missing.
    """
    for owner, names in parts.items():
        for name in names:
            try:
                attrgetter(f'{owner}.{name}')(torch)
            except AttributeError as error:
                raise UnsupportedTorchError(f'has no {owner}.{name}') from error


class Releaser:
    """Drops all backends, and the store, that a `ProcessGroup` object holds.

    Raises:
        UnsupportedTorchError: libtorch does not export what this calls.
    """

    def __init__(self) -> None:
        library = Path(torch.__file__).parent / 'lib' / 'libtorch_cpu.so'
        try:
            # Keeps the GIL: no Python thread sees a group that has no backend.
            libtorch = ctypes.PyDLL(str(library))
            self._release = libtorch[_RELEASE]
            self._vtable = ctypes.addressof(ctypes.c_char.in_dll(libtorch, _VTABLE))
        except (AttributeError, OSError, ValueError) as error:
            raise UnsupportedTorchError(
                f'does not export ProcessGroup::release_resources ({error})'
            ) from error
        self._release.argtypes = [ctypes.c_void_p]
        self._release.restype = None

    def check(self, group: ProcessGroup) -> None:
        """See that `release` would act on the right object.

        Raises:
            UnsupportedTorchError: Python objects of process groups look different.
        """
        self._address(group)

    def release(self, group: ProcessGroup) -> None:
        """Training thread. Until backends are registered again the group is not usable.

        References to the backends keep them alive; without one they are destroyed in here, with
        the GIL held.
        """
        self._release(self._address(group))

    def _address(self, group: ProcessGroup) -> int:
        """Address of the C++ object.

        Pybind11 keeps it, and its holder of the same value, after the head of the Python object.
        """
        place = id(group) + object.__basicsize__
        address, holder = (ctypes.c_void_p * 2).from_address(place)
        if type(group) is not ProcessGroup or not address or address != holder:
            raise UnsupportedTorchError(f'keeps {type(group).__name__} objects in a different way')
        vtable = ctypes.c_void_p.from_address(address).value
        if vtable != self._vtable + _VTABLE_HEADER:
            raise UnsupportedTorchError('has process groups of another C++ class')
        return int(address)


def install(
    releaser: Releaser,
    group: ProcessGroup,
    backend: Backend,
    kind: str,
    devices: Sequence[torch.device],
    store: Store,
) -> list[Backend]:
    """Make `backend` the only one of `group` and tell torch's tables. Training thread.

    Args:
        releaser: takes the present backends out of the group.
        group: a group of torch's tables.
        backend: connected already.
        kind: torch's name of the backend: 'gloo', 'nccl' or 'fake'.
        devices: that it serves.
        store: what it was connected through.

    Returns:
        The old backends; their threads are joined when they are destroyed.

    Raises:
        UnsupportedTorchError: the group still uses another backend.
    """
    name, description = group.group_name, group.group_desc
    number = getattr(ProcessGroup.BackendType, 'CUSTOM' if kind == 'fake' else kind.upper())
    old = [group._get_backend(device) for device in devices]
    releaser.release(group)
    for device in devices:
        group._register_backend(device, number, backend)
    group._set_default_backend(number)
    # The name is kept by the backends only.
    group._set_group_name(name)
    group._set_group_desc(description)
    world.pg_map[group] = (kind, store)
    world.pg_backend_config[group] = ','.join(f'{device.type}:{kind}' for device in devices)
    if any(group._get_backend(device) is not backend for device in devices):
        raise UnsupportedTorchError('does not let go of the old backend of a process group')
    return old


def fake_backend(rank: int, size: int) -> Backend:
    """Its collectives complete at once and leave tensors as they are."""
    return c10d.FakeProcessGroup._create_internal(rank, size)


def forget_coalescing() -> None:
    """Coalescing regions that an exception has left begin anew."""
    world.pg_coalesce_state.clear()


def groups_in_order() -> list[tuple[ProcessGroup, tuple[int, ...]]]:
    """The process groups of this process as of now, as created, with their global ranks."""
    # Any thread: torch enters the ranks of a new group last.
    groups = [(group, world.pg_group_ranks.get(group)) for group in list(world.pg_map)]
    return [(group, tuple(ranks)) for group, ranks in groups if ranks is not None]
