# SPDX-License-Identifier: Apache-2.0
"""What takes long in the set-up of host memory goes on beside the rest of it."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.errors import HostMemoryError
from moevement_ext.memory import device as device_module
from moevement_ext.memory.budget import NOTHING_LOGGED, Logged
from moevement_ext.replicate import host_memory
from moevement_ext.replicate.host_memory import HostMemory
from moevement_ext.replicate.node_plan import Share
from tests.unit.memory.samples import capacity, identity_of, tmpfs_directory
from tests.unit.replicate.peers import host_memory_of, member_of

CPU, GPU = torch.device('cpu'), torch.device('cuda', 3)
DEADLINE_S = 30.0


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv('MOEVEMENT_NODE', 'node-a')
    with tmpfs_directory() as path:
        yield path


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once all is reserved that this rank holds for others."""
    done = threading.Event()
    reserve = HostMemory._reserve_replicas

    def reserving(*args: Any) -> Any:
        found = reserve(*args)
        done.set()
        return found

    monkeypatch.setattr(HostMemory, '_reserve_replicas', reserving)
    return done


class Gpu:
    """CUDA's runtime and driver without a GPU; registers nothing before `gate` is set."""

    def __init__(self, gate: threading.Event, status: int = 0) -> None:
        self.gate = gate
        self.status = status
        self.bound: dict[int, torch.device] = {}
        self.registered: list[torch.device] = []
        self.timely = True

    def set_device(self, device: torch.device) -> None:
        self.bound[threading.get_ident()] = device

    def current_device(self) -> int:
        return self.bound[threading.get_ident()].index

    def cudart(self) -> 'Gpu':
        return self

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        self.timely &= self.gate.wait(DEADLINE_S)
        self.registered.append(self.bound[threading.get_ident()])
        return self.status

    def cudaHostUnregister(self, pointer: int) -> None:
        pass


def use(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=lambda mode: 0)
    monkeypatch.setattr(device_module, 'driver', lambda: driver)
    monkeypatch.setattr(torch, 'cuda', gpu)
    monkeypatch.setattr(torch, 'zeros', lambda *size, **others: None)


def reserve(shm: Path, device: torch.device, logged: Logged = NOTHING_LOGGED) -> HostMemory:
    members = [member_of(node, logged=logged) for node in ('node-a', 'node-b')]
    config = SparseCheckpointConfig(dir=str(shm), replicas=1, window=1)
    share = Share(identity_of(0), capacity(), logged)
    return host_memory_of(config, members, share, device)


def test_own_windows_are_pinned_while_replicas_are_reserved(
    shm: Path, served: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the device of this rank; the set-up ends when all are."""
    gpu = Gpu(served)
    use(gpu, monkeypatch)
    memory = reserve(shm, GPU)
    try:
        assert gpu.timely and gpu.registered == [GPU] * 2
        assert threading.get_ident() not in gpu.bound
    finally:
        memory.close(remove=True)


def test_memory_that_cannot_be_pinned_fails_the_set_up_and_is_freed(
    shm: Path, served: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(Gpu(served, status=2), monkeypatch)
    with pytest.raises(HostMemoryError, match='CUDA cannot pin'):
        reserve(shm, GPU)
    assert not [path for path in shm.rglob('*') if path.is_file()]


def test_log_is_reserved_in_parallel(
    shm: Path, served: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_time: list[bool] = []

    class Log(host_memory.UpstreamLog):
        def __init__(self, *args: Any) -> None:
            in_time.append(served.wait(DEADLINE_S))
            super().__init__(*args)

    monkeypatch.setattr(host_memory, 'UpstreamLog', Log)
    memory = reserve(shm, CPU, Logged(2**12, 2**12))
    try:
        assert in_time == [True]
    finally:
        memory.close(remove=True)


def test_without_room_for_the_log_nothing_is_kept(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise HostMemoryError('no room for the log')

    monkeypatch.setattr(host_memory, 'UpstreamLog', full)
    with pytest.raises(HostMemoryError, match='no room for the log'):
        reserve(shm, CPU, Logged(2**12, 2**12))
    assert not [path for path in shm.rglob('*') if path.is_file()]
