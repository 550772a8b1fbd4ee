# SPDX-License-Identifier: Apache-2.0
"""Devices on which threads of this package run, and pinned files; needs no GPU."""

import gc
import mmap
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moevement_ext.capture.copier import Copier
from moevement_ext.errors import HostMemoryError
from moevement_ext.memory import device
from moevement_ext.memory.device import pin
from moevement_ext.memory.mapped_file import in_pages
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.upstream_log import log as upstream_log
from moevement_ext.memory.upstream_log import ring as ring_module
from moevement_ext.memory.upstream_log.ring import RingMap
from moevement_ext.memory.window import file as file_module
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.generations import FileSize, OwnerWindows
from tests.stand_ins.capture_mode import Driver
from tests.unit.memory.samples import capacity, commit, named, tmpfs_directory

SECOND = torch.device('cuda', 1)
CPU = torch.device('cpu')


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[torch.device]]:
    """Devices that threads have made current, by thread name."""
    bound: dict[str, list[torch.device]] = defaultdict(list)
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 1)
    monkeypatch.setattr(
        torch.cuda,
        'set_device',
        lambda device: bound[threading.current_thread().name].append(device),
    )
    monkeypatch.setattr(device, 'driver', lambda: Driver)
    for name in ('Stream', 'Event'):
        monkeypatch.setattr(torch.cuda, name, lambda *args, **kwargs: None)
    return bound


@pytest.mark.parametrize('given', [torch.device('cuda'), SECOND])
def test_copier_threads_use_the_device_of_the_rank(
    bound: dict[str, list[torch.device]], given: torch.device
) -> None:
    copier = Copier(given)
    copier.drain()
    copier.stop()
    assert bound == {'sparse-ckpt-copy_0': [SECOND], 'sparse-ckpt-seal_0': [SECOND]}


def test_log_thread_uses_the_device_of_the_rank(
    bound: dict[str, list[torch.device]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pinned: list[device._MappedFile] = []
    monkeypatch.setattr(ring_module, 'pin', pinned.append)
    log = upstream_log.UpstreamLog(tmp_path / 'log', 4096, torch.device('cuda'), 0.0, print)
    log.close()
    assert bound == {'upstream-log': [SECOND]}
    (ring,) = pinned
    assert ring.path == tmp_path / 'log' and ring.array.nbytes == 4096


class Runtime:
    """CUDA's runtime on a machine without a GPU; it keeps the last error like CUDA's.

    It registers nothing before `gate` is set.
    """

    def __init__(self, status: int, gate: threading.Event | None = None) -> None:
        self.status = status
        self.gate = gate
        self.timely = True
        self.last_error = 0
        self.registered: list[tuple[int, int]] = []
        self.unregistered: list[int] = []
        self.devices = {threading.get_ident(): torch.device('cuda', 3)}
        self.used: list[torch.device] = []

    def current_device(self) -> int:
        return self.devices.get(threading.get_ident(), torch.device('cuda', 0)).index

    def set_device(self, device: torch.device) -> None:
        self.devices[threading.get_ident()] = device

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        self.timely &= self.gate is None or self.gate.wait(30)
        self.used.append(torch.device('cuda', self.current_device()))
        self.registered.append((pointer, size))
        self.last_error = self.status
        return self.status

    def cudaHostUnregister(self, pointer: int) -> None:
        self.used.append(torch.device('cuda', self.current_device()))
        self.unregistered.append(pointer)

    def launch(self, *args: object, **kwargs: object) -> None:
        """Launch a kernel: raise and clear the last error."""
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f'CUDA error {error}')


def use(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(
        cudart=lambda: runtime, current_device=runtime.current_device, set_device=runtime.set_device
    )
    monkeypatch.setattr(torch, 'cuda', cuda)
    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=lambda mode: 0)
    monkeypatch.setattr(device, 'driver', lambda: driver)
    monkeypatch.setattr(torch, 'zeros', runtime.launch)


def test_whole_pages_are_registered_until_the_file_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime(0)
    use(runtime, monkeypatch)
    file = WindowFile.create(tmp_path / 'w', capacity() + 64)
    pin(file)
    ((pointer, size),) = runtime.registered
    assert pointer == file.array.ctypes.data
    assert size % mmap.PAGESIZE == 0 <= size - file.array.size < mmap.PAGESIZE
    assert not runtime.unregistered
    del file
    gc.collect()
    assert runtime.unregistered == [pointer]


def test_pages_that_cannot_be_locked_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime(2)
    use(runtime, monkeypatch)
    file = WindowFile.create(tmp_path / 'w', capacity())
    with pytest.raises(
        HostMemoryError, match=r'w: CUDA cannot pin .* \(error 2\)\. Raise the limit of locked'
    ):
        pin(file)
    runtime.launch()  # training continues: its next kernel must not raise this error
    del file
    gc.collect()
    assert not runtime.unregistered


@pytest.mark.parametrize('pinned', [True, False])
def test_later_window_is_pinned_like_the_earlier_ones(
    pinned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime(0)
    use(runtime, monkeypatch)
    with tmpfs_directory() as shm:
        windows = OwnerWindows(NodeStore(shm, 'run', 'node'), 0, 0, capacity(window=1))
        before = windows.files()
        for file in before if pinned else ():
            pin(file)
        larger = windows.begin_larger(named(0), capacity())
        late = [pointer for pointer, _ in runtime.registered[len(before) :]]
        assert late == ([larger.array.ctypes.data] if pinned else [])
        runtime.status = 2
        windows.begin_larger(named(9), capacity())
    assert bool(caplog.messages) == pinned
    assert not runtime.last_error, 'the next kernel would raise it'


def test_pinned_range_follows_the_reserved_range_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(0)
    use(runtime, monkeypatch)
    long, short = capacity(), capacity(window=1)
    with tmpfs_directory() as shm:
        windows = OwnerWindows(NodeStore(shm, 'run', 'node'), 0, 0, FileSize(long, short))
        for file in windows.files():
            pin(file, file.room)
        commit(windows, 0, window=1)
        windows.persisted(named(0))
        used = windows.file(named(0))
        assert used is not None
        runtime.registered.clear()
        windows.make_room(long)
        (free,) = [file for file in windows.files() if file is not used]
        assert runtime.registered == [(free.array.ctypes.data, in_pages(long))], 'in use'
        assert runtime.unregistered == [free.array.ctypes.data]
        commit(windows, 3, window=1)
        windows.persisted(named(3))
        assert runtime.registered[1:] == [(used.array.ctypes.data, in_pages(long))]
        runtime.registered.clear()
        released: list[tuple[int, int]] = []
        release = file_module.release_range

        def spy(array: np.ndarray, begin: int, end: int) -> None:
            released.append((array.ctypes.data, runtime.unregistered.count(array.ctypes.data)))
            release(array, begin, end)

        monkeypatch.setattr(file_module, 'release_range', spy)
        windows.make_room(short)
        assert released == [(used.array.ctypes.data, 2)], 'the device writes to none of them'
        assert runtime.registered == [(used.array.ctypes.data, in_pages(short))]


def test_other_threads_pin_on_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the runtime makes a context on GPU 0, in which rank 0 may run out of memory."""
    runtime = Runtime(0)
    use(runtime, monkeypatch)
    long, short = capacity(), capacity(window=1)
    with tmpfs_directory() as shm:
        windows = OwnerWindows(NodeStore(shm, 'run', 'node'), 0, 0, FileSize(long, short))
        for file in windows.files():
            pin(file, file.room)
        for call in (
            partial(windows.make_room, long),
            partial(windows.begin_larger, named(0), long + mmap.PAGESIZE),
        ):
            done = len(runtime.used)
            with ThreadPoolExecutor(1) as tracker:
                tracker.submit(call).result()
            assert len(runtime.used) > done
    assert set(runtime.used) == {torch.device('cuda', 3)}


def test_log_map_stays_registered_while_a_copy_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime(0)
    use(runtime, monkeypatch)
    former = RingMap.of_size(tmp_path / 'log', 8 * mmap.PAGESIZE, pinned=True)
    smaller = former.first(2 * mmap.PAGESIZE)
    sizes = [size // mmap.PAGESIZE for _, size in runtime.registered]
    assert sizes == [8, 2] and runtime.registered[1][0] == smaller.array.ctypes.data
    pointer = former.array.ctypes.data
    under_way = [former]
    del former
    gc.collect()
    assert not runtime.unregistered
    under_way.clear()
    gc.collect()
    assert runtime.unregistered == [pointer]
