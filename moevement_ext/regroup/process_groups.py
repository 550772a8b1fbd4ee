# SPDX-License-Identifier: Apache-2.0
"""All process groups of this process: ended together after a fault, then reconnected in place.

`ProcessGroup` objects stay the same; the backend inside is replaced. So references of modules,
buckets, optimizers and schedules to them stay valid.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash
from torch._C._distributed_c10d import Backend, ProcessGroup
from torch.distributed import DistError, PrefixStore, Store, default_pg_timeout

from moevement_ext.errors import SparseCheckpointError, some
from moevement_ext.regroup import gloo, internals, waits
from moevement_ext.regroup.interruptible_store import InterruptibleStore, used_by_any

if TYPE_CHECKING:
    from moevement_ext.regroup.nccl import Nccl  # not every build of torch has NCCL

type _Kind = gloo.Gloo | Nccl

FAKE = 'fake'
NCCL = 'nccl'
# Far longer than the destruction of backends without pending operations.
_DESTROY_S = 0.5
# torch's name of a backend, by its class.
_KINDS = {'FakeProcessGroup': FAKE, 'ProcessGroupGloo': gloo.NAME, 'ProcessGroupNCCL': NCCL}


_CONNECT_S = 60.0
_RANKS_CONNECTED = 1024


class _GivenUp(RuntimeError):
    """A group is not connected, as the renewal has already failed."""


class RegroupError(SparseCheckpointError):
    """Groups could not reconnect; those with a real backend raise until they do."""


class _Group(NamedTuple):
    """One process group."""

    group: ProcessGroup
    ranks: tuple[int, ...]
    """Global ranks in the order of the group."""
    occurrence: int
    """Index of the group among groups of the same ranks, in order of creation."""
    devices: list[torch.device]
    """Devices that its backend serves."""
    kind: str
    """Kind of its real backend, such as 'nccl'."""
    options: Any
    """Options of its real backend."""

    @property
    def name(self) -> str:
        """Unique name of the group, the same on all its ranks."""
        ranks = ','.join(map(str, self.ranks))
        return f'{xxhash.xxh3_64_hexdigest(ranks.encode())}.{self.occurrence}'


class _Open(NamedTuple):
    """A usable backend, which must be closed."""

    kind: str
    backend: Any
    ranks: tuple[int, ...]


class ProcessGroups:
    """All process groups of this process, the world included.

    `unblock` and `renew` add groups that were created later, and drop destroyed ones. Groups
    that were created fake get `backend` ('gloo' or 'nccl') and `timeout`; groups with a real
    backend keep theirs.

    Raises:
        UnsupportedTorchError: a part of torch that renewing needs is missing.
        SparseCheckpointError: a group has a backend that cannot be renewed; names the group.
    """

    def __init__(self, backend: str, timeout: timedelta = default_pg_timeout) -> None:
        internals.check(internals.PARTS)
        internals.libtorch()
        self._backend = backend
        self._timeout = timeout
        self._kinds = {backend: _kind(backend)}
        self._rank = torch.distributed.get_rank()
        self._lock = threading.Lock()
        # Below: guarded by the lock.
        self._groups: dict[ProcessGroup, _Group] = {}
        self._open: list[_Open] = []
        self._unblocked = False
        # Names of groups that were connected when `unblock` ended them.
        self._in_use: set[str] = set()
        # Below: for the training thread. `_tried` keeps a reference, as torch keeps only the C++
        # part of a store in Python.
        self._tried: Store | None = None
        self._used: list[Store] = []
        self._addresses: list[tuple[_Kind, Store, int]] = []
        self._destroying: threading.Thread | None = None
        with self._lock:
            self._take_up()
        if self._kinds.keys() == {gloo.NAME}:
            waits.install()

    def unblock(self) -> None:
        """End all operations in process groups with a real backend. Any thread, idempotent.

        On gloo all pending and later operations raise, even half-transferred ones (see
        `waits`). On NCCL waits return, see `Nccl.close`. A running `renew` raises.
        """
        closing: list[_Open] = []
        try:
            # Atomic: once the first group is closed, the training thread may call `renew`.
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
        """Close groups of calls that an exception left open.

        Runs on the training thread, which made the calls, if possible before `unblock`:
        recorded calls on a communicator must not be touched after its abort.
        """
        internals.forget_coalescing()
        for kind in self._kinds.values():
            kind.end_calls()

    def renew(
        self,
        store: InterruptibleStore,
        members: Collection[int] | None,
        timeout: timedelta,
        kept: Collection[int] = (),
    ) -> None:
        """Give groups a new backend. Training thread, without pending operations.

        Collective over `members`. Groups whose ranks are all members get a real backend; the other
        groups get a fake one, whose operations complete at once and leave tensors unchanged.

        Args:
            store: has a prefix that was never used before; a waiting thread does not occupy its
                connection, so that several groups connect at a time.
            members: global ranks; None means all.
            timeout: for the connection of each group.
            kept: ranks connected by an earlier renewal: their groups stay unchanged on all of
                these ranks.

        Raises:
            RegroupError: a member did not connect or left, or `unblock` was called meanwhile.
                Groups with a real backend raise until another call, with another prefix, succeeds.
        """
        with self._lock:
            self._unblocked = False
            waits.resume()
            self._take_up()
            self._note_in_use()
            groups = sorted(
                (group for group in self._groups.values() if not set(kept) >= set(group.ranks)),
                key=lambda group: (group.ranks, group.occurrence),
            )
        self._close_open(kept)
        self.end_calls()
        self.await_destruction()
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
            self._in_use -= {group.name for group in inside}  # the new backends show their use
        self._destroying = _destroy(replaced)
        self._used = [*(self._used if kept else ()), store]

    def await_destruction(self) -> None:
        """Wait a limited time for the destruction of the backends that were replaced last."""
        if self._destroying is not None:
            self._destroying.join(_DESTROY_S)

    @property
    def waits_returned(self) -> bool:
        """True if waits since `renew` may have returned before the operation's end. Any thread."""
        return self._unblocked and any(kind.waits_return for kind in list(self._kinds.values()))

    def synchronize(self) -> None:
        """Wait for queued work on the device, if there is one. Training thread."""
        for kind in self._kinds.values():
            kind.synchronize()

    def check_device(self) -> None:
        """Check that this process's device still computes. Training thread, after `unblock`.

        Raises `RuntimeError` if the device is lost for this process.
        """
        for kind in self._kinds.values():
            kind.check_device()

    def _at_once(
        self,
        groups: Sequence[_Group],
        store: Store,
        members: Collection[int] | None,
        timeout: timedelta,
    ) -> set[str]:
        """Names of the groups to connect now, not at their first use. Collective."""
        names = {group.name for group in groups}
        size = torch.distributed.get_world_size() if members is None else len(members)
        if NCCL not in self._kinds or size < 2:
            return names
        try:
            return used_by_any(store, size, self._in_use, names, timeout)
        except (RuntimeError, OSError) as error:
            self._raise_if_unblocked()
            raise RegroupError(
                f'Not all of {size} ranks began to connect their process groups within '
                f'{timeout.total_seconds():g} s: {error}'
            ) from error

    def _note_in_use(self) -> None:
        """Record the connected groups before their end. Under the lock."""
        for group in self._groups.values():
            backend: Any = group.group._get_backend(group.devices[0])
            kind = _KINDS.get(type(backend).__name__, FAKE)
            if kind != FAKE and self._kinds[kind].is_connected(backend):
                self._in_use.add(group.name)

    def _connect(
        self,
        groups: Sequence[_Group],
        stores: dict[ProcessGroup, PrefixStore],
        at_once: set[str],
        timeout: timedelta,
    ) -> dict[ProcessGroup, Backend]:
        """Begin to connect the groups in the same order on all ranks, to avoid circular waits."""
        together = min(kind.at_a_time for kind in self._kinds.values())
        failed = threading.Event()
        # The training thread's device; a new thread would use the first GPU of the node.
        on_gpu = torch.cuda.is_initialized()
        device = torch.device('cuda', torch.cuda.current_device()) if on_gpu else None

        def check() -> None:
            if self._unblocked or failed.is_set():
                raise _GivenUp('another group could not be connected')

        def connect(group: _Group) -> Backend:
            check()
            kind, rank = self._kinds[group.kind], group.ranks.index(self._rank)
            store = stores[group.group]
            with self._lock:
                self._addresses.append((kind, store, rank))
            try:
                backend = kind.connect(
                    store,
                    rank,
                    len(group.ranks),
                    group.options,
                    group.group.bound_device_id or device,
                    timeout,
                    check,
                    group.name in at_once,
                )
            except BaseException:
                failed.set()
                raise
            with self._lock:
                self._open.append(_Open(group.kind, backend, group.ranks))
            return backend

        with ThreadPoolExecutor(together, thread_name_prefix='sparse-ckpt-groups') as pool:
            connecting = [pool.submit(connect, group) for group in groups]
        self._raise_if_failed(groups, connecting, timeout)
        return {
            group.group: found.result() for group, found in zip(groups, connecting, strict=True)
        }

    def _raise_if_failed(
        self, groups: Sequence[_Group], connecting: Sequence[Future[Backend]], timeout: timedelta
    ) -> None:
        errors = [(group, one.exception()) for group, one in zip(groups, connecting, strict=True)]
        found = [(group, error) for group, error in errors if error is not None]
        if not found and not self._unblocked:
            return
        self._close_open()
        self._raise_if_unblocked()
        group, error = next(((g, e) for g, e in found if not isinstance(e, _GivenUp)), found[0])
        if not isinstance(error, RuntimeError | OSError):  # OSError: from a store in Python
            raise error
        raise RegroupError(
            f'The process group of ranks {some(group.ranks)} could not be connected '
            f'within {timeout.total_seconds():g} s: {error}'
        ) from error

    def _install(self, group: _Group, backend: Backend | None, store: Store) -> list[Backend]:
        kind = group.kind
        if backend is None:
            kind = FAKE
            backend = internals.fake_backend(group.ranks.index(self._rank), len(group.ranks))
        return internals.install(group.group, backend, kind, group.devices, store)

    def _raise_if_unblocked(self) -> None:
        if self._unblocked:
            raise RegroupError('unblock() was called while the process groups were being connected')

    def _close_open(self, kept: Collection[int] = ()) -> None:
        with self._lock:
            closing = self._pop_open(kept)
        self._close(closing)

    def _pop_open(self, kept: Collection[int] = ()) -> list[_Open]:
        """Remove and return the open backends, except groups of kept ranks. Under the lock."""
        popped = [one for one in self._open if not set(kept) >= set(one.ranks)]
        self._open = [one for one in self._open if set(kept) >= set(one.ranks)]
        return popped

    def _close(self, closing: list[_Open]) -> None:
        """Close backends in order of connection, the same on every rank."""
        for name, kind in list(self._kinds.items()):
            kind.close([one.backend for one in closing if one.kind == name])

    def _forget_addresses(self) -> None:
        """Delete the last renewal's addresses, as its groups are connected or given up."""
        addresses, self._addresses = self._addresses, []
        # Their connection may be lost since; then rank 0 deletes them with the keys of the round.
        with contextlib.suppress(DistError):
            for kind, store, rank in addresses:
                kind.forget(store, rank)

    def _take_up(self) -> None:
        """Update the list of existing groups, in order of creation. Under the lock."""
        groups: dict[ProcessGroup, _Group] = {}
        seen: Counter[tuple[int, ...]] = Counter()
        for group, ranks in internals.groups_in_order():
            entry = self._groups.get(group) or self._describe(group, ranks)
            groups[group] = entry._replace(occurrence=seen[ranks])
            seen[ranks] += 1
        self._groups = groups

    def _describe(self, group: ProcessGroup, ranks: tuple[int, ...]) -> _Group:
        internals.address_of(group)  # raises if the group has another class
        devices = sorted(group._device_types, key=str)
        backends: list[Any] = [group._get_backend(device) for device in devices]
        name, backend = self._kind_name(ranks, backends), backends[0]
        if name != FAKE:
            kind = self._kinds.setdefault(name, _kind(name))
            self._open.append(_Open(name, backend, ranks))
            return _Group(group, ranks, 0, devices, name, kind.options(backend))
        able = torch.distributed.Backend.backend_capability[self._backend]
        if torch.device('cpu') in devices and 'cpu' not in able:
            raise SparseCheckpointError(
                f'The fake process group of ranks {some(ranks)} serves CPU tensors, '
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
            f'The process group of ranks {some(ranks)} uses {" and ".join(sorted(classes))}; '
            'only groups of one backend, gloo or the classic ProcessGroupNCCL, can be renewed '
            f'after a fault. {remedy}'
        )


def _destroy(backends: list[Backend]) -> threading.Thread:
    """Destroy closed backends on a separate thread; only the next renewal waits, for a while.

    The destructor joins the backend's threads, and a thread in a half-transferred gloo
    operation ends only at the group's timeout.
    """
    thread = threading.Thread(target=backends.clear, name='sparse-ckpt-destroy', daemon=True)
    thread.start()
    return thread


def connect_timeout(world_size: int) -> timedelta:
    """Timeout for connecting one group, once all ranks start; grows with the job, for NCCL."""
    return timedelta(seconds=_CONNECT_S * max(1.0, world_size / _RANKS_CONNECTED))


def stand_in_for(backend: str) -> None:
    """Make later fake process groups serve the devices of `backend`.

    A joining process calls this before `init_process_group('fake')`: torch chooses the device of
    object collectives from the devices that a group serves.
    """
    # This import registers fake groups, for all devices.
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    capability = torch.distributed.Backend.backend_capability
    capability[FAKE] = list(capability[backend])


def _kind(name: str) -> _Kind:
    if name == gloo.NAME:
        internals.check(gloo.PARTS)
        return gloo.Gloo()
    if name == NCCL:
        # Not every build of torch has NCCL.
        from moevement_ext.regroup import nccl

        internals.check(nccl.PARTS)
        return nccl.Nccl()
    raise SparseCheckpointError(f'Backend {name}: only gloo and nccl groups can be renewed')
