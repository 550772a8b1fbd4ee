# SPDX-License-Identifier: Apache-2.0
"""Devices on which threads of this package run; needs no GPU."""

import threading
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from moevement_ext.capture.copier import Copier
from moevement_ext.memory import device
from moevement_ext.memory.upstream_log import log as upstream_log
from moevement_ext.memory.upstream_log import ring as ring_module
from tests.stand_ins.capture_mode import Driver

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


def test_cpu_device_is_not_bound(bound: dict[str, list[torch.device]]) -> None:
    assert device.with_index(CPU) == CPU
    device.bind_thread(CPU)
    assert not bound
