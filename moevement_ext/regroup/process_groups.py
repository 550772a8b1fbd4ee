# SPDX-License-Identifier: Apache-2.0
"""All process groups of this process: ended together after a fault, then connected anew in place.

`ProcessGroup` objects stay the same ones; the backend inside is replaced. So what modules,
buckets, optimizers and schedules hold of them stays valid.
"""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import xxhash
from torch._C._distributed_c10d import Backend, ProcessGroup
from torch.distributed import PrefixStore, Store, default_pg_timeout

from moevement_ext.errors import SparseCheckpointError
from moevement_ext.regroup import agreeing, gloo, internals, waits

FAKE = 'fake'
NCCL = 'nccl'
# Far more than it takes to destroy backends in which nothing is pending.
_DESTROY_SECONDS = 0.5
# torch's name of a backend, by its class.
_KINDS = {
    'FakeProcessGroup': FAKE,
    'ProcessGroupGloo': gloo.NAME,
    'ProcessGroupNCCL': NCCL,
}


_CONNECT_SECONDS = 60.0
_RANKS_CONNECTED = 1024


class RegroupError(SparseCheckpointError):
    """Groups could not be connected anew; what had a real backend raises until they are."""


class BackendKind(Protocol):
    """Knows one kind of real backend: `Gloo` or `Nccl`."""

    waits_return: bool
    """Operations that are ended return, with undefined contents of tensors; else they raise."""

    def options(self, backend: Any) -> Any:
        """What a successor is to take over."""

    def default_options(self, timeout: timedelta) -> Any:
        """For the successor of a fake backend."""

    def connect(
        self,
        store: Store,
        rank: int,
        size: int,
        options: Any,
        device: torch.device | None,
        timeout: timedelta,
        interrupted: Callable[[], bool],
        at_once: bool,
    ) -> Backend:
        """A backend connected, `at_once` or when it is used, through `store`; until interrupted."""

    def is_connected(self, backend: Any) -> bool:
        """It has been, or will be without being used."""

    def make_room(self) -> None:
        """Give back what connecting needs of the device and others keep without using it."""

    def forget(self, store: Store, rank: int) -> None:
        """Remove what `connect` left in the store."""

    def close(self, backends: Any) -> None:
        """End every operation, pending or to come."""

    def end_calls(self) -> None:
        """Close what calls that an error cut off have left open. The thread that called."""

    def synchronize(self) -> None:
        """Wait for what the training thread has queued on the device."""

    def check_device(self) -> None:
        """Raises a RuntimeError if the device is lost."""


class _Group(NamedTuple):
    """One process group."""

    group: ProcessGroup
    ranks: tuple[int, ...]
    """Global ranks in the order of the group."""
    occurrence: int
    """Number of the group among those of the same ranks, in order of creation."""
    devices: list[torch.device]
    """Devices that its backend serves."""
    kind: str
    """Kind of its real backend, such as 'nccl'."""
    options: Any
    """Options of its real backend."""

    @property
    def name(self) -> str:
        """The same on all ranks of the group, and of no other group."""
        ranks = ','.join(map(str, self.ranks))
        return f'{xxhash.xxh3_64_hexdigest(ranks.encode())}.{self.occurrence}'


class ProcessGroups:
    """All process groups this process is a member of, the world included.

    Groups that are created later are taken up, and destroyed ones dropped, by either method.

    Args:
        backend: 'gloo' or 'nccl', the real backend of groups that were made fake. Groups that have
            a real backend keep its kind.
        timeout: of operations in groups that were made fake; the others keep theirs.

    Raises:
        UnsupportedTorchError: torch lacks a part that renewing needs.
        SparseCheckpointError: a group has a backend that cannot be renewed; names it.
    """

    def __init__(self, backend: str, timeout: timedelta = default_pg_timeout) -> None:
        internals.check(internals.PARTS)
        self._releaser = internals.Releaser()
        self._backend = backend
        self._timeout = timeout
        self._kinds = {backend: _kind(backend)}
        self._rank = torch.distributed.get_rank()
        self._lock = threading.Lock()
        # Below: guarded by the lock.
        self._groups: dict[ProcessGroup, _Group] = {}
        self._open: list[tuple[str, Backend]] = []
        self._unblocked = False
        self._in_use: set[str] = set()
        """Names of groups that were connected when they were ended."""
        # Below: of the training thread. Of a store that is a Python object torch keeps only the
        # part that is not.
        self._tried: Store | None = None
        self._used: Store | None = None
        self._addresses: list[tuple[BackendKind, Store, int]] = []
        with self._lock:
            self._take_up()
        if self._kinds.keys() == {gloo.NAME}:
            waits.install()

    def unblock(self) -> None:
        """End everything that waits in a process group with a real backend. Any thread, idempotent.

        On gloo every operation, pending or to come, raises, also when it is half transferred (see
        `waits`). On NCCL waits return, see `Nccl.close`. A `renew` that is under way raises.
        """
        closing: list[tuple[str, Backend]] = []
        try:
            # In one step: from the first group closed on, the training thread may call `renew`.
            with self._lock:
                self._unblocked = True
                closing += self._pop_open()
                self._take_up()
                self._note_in_use()
                closing += self._pop_open()
        finally:
            self._close(closing)
            with self._lock:
                if self._unblocked:  # no `renew` has begun since
                    waits.end()

    def end_calls(self) -> None:
        """Leave the calls that an exception has cut off: it skips what would end them.

        Training thread, which called them; before `unblock` where that can be: what it has called
        of a communicator must not be looked at any more once that is aborted.
        """
        internals.forget_coalescing()
        for kind in self._kinds.values():
            kind.end_calls()

    def renew(self, store: Store, members: Collection[int] | None, timeout: timedelta) -> None:
        """Give every group a new backend. Training thread, when nothing is pending.

        All ranks of `members` call this together. Groups whose ranks are all members get a real
        backend; the other groups get a fake one, whose operations complete at once and leave
        tensors as they are.

        Args:
            store: with a prefix that was never used before. Other threads that use the same
                connection wait while this waits for a member: let a watchdog have its own.
            members: global ranks; None means all.
            timeout: for each group to be connected: they are, one after the other.

        Raises:
            RegroupError: a member did not come or left, or `unblock` was called meanwhile. What
                had a real backend raises until another call, with another prefix, succeeds.
        """
        with self._lock:
            self._unblocked = False
            waits.resume()
            self._take_up()
            self._note_in_use()
            groups = sorted(
                self._groups.values(), key=lambda group: (group.ranks, group.occurrence)
            )
        self._close_open()
        self.end_calls()
        for kind in self._kinds.values():
            kind.make_room()
        self._forget_addresses()
        self._tried = store
        stores = {group.group: PrefixStore(group.name, store) for group in groups}
        inside = [group for group in groups if members is None or set(members) >= set(group.ranks)]
        at_once = self._at_once(inside, store, members, timeout)
        backends = self._connect(inside, stores, at_once, timeout)
        with self._lock:
            self._raise_if_unblocked()
            replaced: list[Backend] = []
            for group in groups:
                store_of = stores[group.group]
                replaced += self._install(group, backends.get(group.group), store_of)
            self._in_use -= {group.name for group in inside}  # what they are is seen in them
        _destroy(replaced)
        self._used = store

    @property
    def waits_returned(self) -> bool:
        """Since `renew`, waits may have returned before their operation was done. Any thread."""
        return self._unblocked and any(kind.waits_return for kind in list(self._kinds.values()))

    def synchronize(self) -> None:
        """Wait for what is queued on the device; without one there is nothing. Training thread."""
        for kind in self._kinds.values():
            kind.synchronize()

    def check_device(self) -> None:
        """See that the device of this process still computes. Training thread, after `unblock`.

        Raises:
            RuntimeError: it does not, and never will in this process.
        """
        for kind in self._kinds.values():
            kind.check_device()

    def _at_once(
        self,
        groups: Iterable[_Group],
        store: Store,
        members: Collection[int] | None,
        timeout: timedelta,
    ) -> set[str]:
        """Names of the groups that are connected now, not when they are used. On all members."""
        names = {group.name for group in groups}
        size = torch.distributed.get_world_size() if members is None else len(members)
        if NCCL not in self._kinds or size < 2:
            return names
        try:
            return agreeing.used_by_any(store, size, self._in_use, names, timeout)
        except (RuntimeError, OSError) as error:
            self._raise_if_unblocked()
            raise RegroupError(
                f'Not all of {size} ranks came to connect their process groups within '
                f'{timeout.total_seconds():g} s: {error}'
            ) from error

    def _note_in_use(self) -> None:
        """Before they are ended. With the lock."""
        for group in self._groups.values():
            backend = group.group._get_backend(group.devices[0])
            kind = _KINDS.get(type(backend).__name__, FAKE)
            if kind != FAKE and self._kinds[kind].is_connected(backend):
                self._in_use.add(group.name)

    def _connect(
        self,
        groups: Iterable[_Group],
        stores: dict[ProcessGroup, PrefixStore],
        at_once: set[str],
        timeout: timedelta,
    ) -> dict[ProcessGroup, Backend]:
        """All ranks connect groups in the same order, so that none waits for another in a ring."""
        backends: dict[ProcessGroup, Backend] = {}
        for group in groups:
            try:
                now = group.name in at_once
                backend = self._connect_one(group, stores[group.group], timeout, now)
            except (RuntimeError, OSError) as error:  # the latter: from a store written in Python
                self._close_open()
                self._raise_if_unblocked()
                raise RegroupError(
                    f'The process group of ranks {_shown(group.ranks)} could not be connected '
                    f'within {timeout.total_seconds():g} s: {error}'
                ) from error
            backends[group.group] = backend
            with self._lock:
                self._open.append((group.kind, backend))
                unblocked = self._unblocked
            if unblocked:
                self._close_open()
                self._raise_if_unblocked()
        return backends

    def _connect_one(
        self, group: _Group, store: Store, timeout: timedelta, at_once: bool
    ) -> Backend:
        kind, rank = self._kinds[group.kind], group.ranks.index(self._rank)
        self._addresses.append((kind, store, rank))
        return kind.connect(
            store,
            rank,
            len(group.ranks),
            group.options,
            group.group.bound_device_id,
            timeout,
            lambda: self._unblocked,
            at_once,
        )

    def _install(self, group: _Group, backend: Backend | None, store: Store) -> list[Backend]:
        kind = group.kind
        if backend is None:
            kind = FAKE
            backend = internals.fake_backend(group.ranks.index(self._rank), len(group.ranks))
        return internals.install(self._releaser, group.group, backend, kind, group.devices, store)

    def _raise_if_unblocked(self) -> None:
        if self._unblocked:
            raise RegroupError('unblock() was called while the process groups were being connected')

    def _close_open(self) -> None:
        with self._lock:
            closing = self._pop_open()
        self._close(closing)

    def _pop_open(self) -> list[tuple[str, Backend]]:
        """What is open, handed out once. With the lock."""
        popped, self._open = self._open, []
        return popped

    def _close(self, closing: list[tuple[str, Backend]]) -> None:
        """What was connected first comes first, on every rank."""
        for name, kind in list(self._kinds.items()):
            kind.close([backend for other, backend in closing if other == name])

    def _forget_addresses(self) -> None:
        """Delete those of the last renewal: its groups are connected by now, or given up."""
        for kind, store, rank in self._addresses:
            kind.forget(store, rank)
        self._addresses.clear()

    def _take_up(self) -> None:
        """Know the groups that exist as of now, in order of creation. With the lock."""
        groups: dict[ProcessGroup, _Group] = {}
        seen: Counter[tuple[int, ...]] = Counter()
        for group, ranks in internals.groups_in_order():
            entry = self._groups.get(group) or self._describe(group, ranks)
            groups[group] = entry._replace(occurrence=seen[ranks])
            seen[ranks] += 1
        self._groups = groups

    def _describe(self, group: ProcessGroup, ranks: tuple[int, ...]) -> _Group:
        self._releaser.check(group)
        devices = sorted(group._device_types, key=str)
        backends = [group._get_backend(device) for device in devices]
        name, backend = self._kind_name(ranks, backends), backends[0]
        if name != FAKE:
            kind = self._kinds.setdefault(name, _kind(name))
            self._open.append((name, backend))
            return _Group(group, ranks, 0, devices, name, kind.options(backend))
        able = torch.distributed.Backend.backend_capability[self._backend]
        if torch.device('cpu') in devices and 'cpu' not in able:
            raise SparseCheckpointError(
                f'The fake process group of ranks {_shown(ranks)} serves CPU tensors, '
                f'{self._backend} cannot: call stand_in_for({self._backend!r}) before '
                'torch.distributed.init_process_group.'
            )
        options = self._kinds[self._backend].default_options(self._timeout)
        return _Group(group, ranks, 0, devices, self._backend, options)

    def _kind_name(self, ranks: tuple[int, ...], backends: list[Backend]) -> str:
        classes = {type(backend).__name__ for backend in backends}
        if len(classes) == 1 and classes <= _KINDS.keys():
            return _KINDS[classes.pop()]
        remedy = (
            'Set TORCH_DIST_USE_NCCL2=0 before the first process group is made.'
            if any(name.startswith('ProcessGroupNCCL') for name in classes - _KINDS.keys())
            else 'Choose one of them and leave TORCH_DISTRIBUTED_DEBUG=DETAIL unset.'
        )
        raise SparseCheckpointError(
            f'The process group of ranks {_shown(ranks)} uses {" and ".join(sorted(classes))}; '
            'only groups of one backend, gloo or the classic ProcessGroupNCCL, can be renewed '
            f'after a fault. {remedy}'
        )


def _destroy(backends: list[Backend]) -> None:
    """Let go of closed backends. On a thread of its own, which is left behind if need be.

    Threads of theirs are joined, and one that is at a half transferred operation of gloo ends only
    when the group's time is up.
    """
    thread = threading.Thread(target=backends.clear, name='sparse-ckpt-destroy', daemon=True)
    thread.start()
    thread.join(_DESTROY_SECONDS)


def connect_timeout(world_size: int) -> timedelta:
    """For all to connect one group, once all are about to: NCCL brings all of a group together."""
    return timedelta(seconds=_CONNECT_SECONDS * max(1.0, world_size / _RANKS_CONNECTED))


def stand_in_for(backend: str) -> None:
    """Fake process groups made from now on serve the devices that `backend` does.

    To be called before `init_process_group('fake')` by a process that is to join others: torch
    chooses the device of object collectives by the devices that a group serves.
    """
    # Importing this registers fake groups, for all devices.
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    capability = torch.distributed.Backend.backend_capability
    capability[FAKE] = list(capability[backend])


def _kind(name: str) -> BackendKind:
    if name == gloo.NAME:
        internals.check(gloo.PARTS)
        return gloo.Gloo()
    if name == NCCL:
        # Not every build of torch has NCCL.
        from moevement_ext.regroup import nccl

        internals.check(nccl.PARTS)
        return nccl.Nccl()
    raise SparseCheckpointError(f'Backend {name}: only gloo and nccl groups can be renewed')


def _shown(ranks: tuple[int, ...]) -> str:
    """The first few."""
    return ', '.join(map(str, ranks[:8])) + (', ...' if len(ranks) > 8 else '')
