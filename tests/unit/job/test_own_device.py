# SPDX-License-Identifier: Apache-2.0
"""Selection of a process's GPU; needs no GPU."""

from types import SimpleNamespace

import pytest
import torch

from moevement_ext.job import own_device
from moevement_ext.system import process_setup


@pytest.mark.parametrize(
    ('local_rank', 'visible', 'chosen', 'taken'),
    [
        ('3', 8, 0, 3),
        ('0', 8, 0, 0),
        (None, 8, 0, 0),
        ('3', 1, 0, 0),  # the launcher shows each process its own GPU only
        ('3', 8, 5, 5),  # the program has chosen
        ('3', 0, 0, 0),
    ],
)
def test_process_takes_the_gpu_of_its_local_rank(
    local_rank: str | None,
    visible: int,
    chosen: int,
    taken: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    present = [chosen]
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: visible)
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: present[0])
    monkeypatch.setattr(torch.cuda, 'set_device', lambda device: present.__setitem__(0, device))
    monkeypatch.delenv('LOCAL_RANK', raising=False)
    if local_rank is not None:
        monkeypatch.setenv('LOCAL_RANK', local_rank)
    own_device.take()
    assert present == [taken]


@pytest.mark.parametrize('gpu', [True, False])
def test_process_is_bound_to_cpus_by_the_pci_address_of_its_gpu(
    gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: gpu)
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 3)
    monkeypatch.setattr(torch.cuda, 'get_device_properties', {3: address}.__getitem__)
    monkeypatch.setattr(process_setup, 'bind', asked.append)
    own_device.bind()
    assert asked == (['0000:1b:00.0'] if gpu else [])
