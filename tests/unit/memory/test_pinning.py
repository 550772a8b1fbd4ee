# SPDX-License-Identifier: Apache-2.0
import gc
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moevement_ext.memory.pinning import payload_tensor, pin
from moevement_ext.memory.window.file import WindowFile
from tests.unit.memory.samples import capacity


class Runtime:
    """CUDA's runtime on a machine without a GPU: says how many pages it was given to lock."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.registered: list[int] = []
        self.unregistered: list[int] = []

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        self.registered.append(pointer)
        return self.status

    def cudaHostUnregister(self, pointer: int) -> None:
        self.unregistered.append(pointer)


def use(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_available=lambda: True, cudart=lambda: runtime)
    monkeypatch.setattr(torch, 'cuda', cuda)
    monkeypatch.setattr(torch, 'zeros', lambda *args, **kwargs: None)


@pytest.mark.parametrize('status', [0, 2])
def test_pages_are_registered_once_and_given_back_if_they_were_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    runtime = Runtime(status)
    use(runtime, monkeypatch)
    file = WindowFile.create(tmp_path / 'w', capacity())
    pin(file)
    payload_tensor(file, file.array)
    assert len(runtime.registered) == 1
    del file
    gc.collect()
    assert len(runtime.unregistered) == (status == 0)


def test_pages_that_cannot_be_locked_are_used_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(Runtime(2), monkeypatch)
    file = WindowFile.create(tmp_path / 'w', capacity())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert payload_tensor(file, file.array).numel() == capacity()
    assert len(caplog.records) == 1
    assert 'cannot be registered as pinned memory (CUDA error 2)' in caplog.text
    assert 'ulimit -l' in caplog.text
