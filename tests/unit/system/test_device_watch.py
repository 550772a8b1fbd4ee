# SPDX-License-Identifier: Apache-2.0
"""Faults of devices are reported once, each device for itself."""

import queue
import threading
from collections.abc import Iterator

import pytest

from moevement_ext.system import nvml
from moevement_ext.system.nvml import DeviceWatch, Finding
from tests.unit.system.conftest import Devices

pytestmark = [pytest.mark.timed, pytest.mark.timeout(120)]

A, B = 'GPU-a1', 'GPU-b2'


def test_each_fault_of_each_device_is_reported_once(devices: Devices) -> None:
    devices.set(A, lost=True)
    devices.set(B)
    source = nvml.of_this_node()
    assert source is not None
    told: list[Finding] = []
    watching = DeviceWatch(source, told.append)
    watching.look()
    assert [one.device for one in told] == [A], 'a spare node reports it at its first reading'
    devices.set(B, no_row_left=1)
    for _ in range(2):
        watching.look()
    devices.set(B, action=1)
    watching.look()
    assert [one.device for one in told] == [A, B, B]


@pytest.fixture
def found(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> Iterator['queue.SimpleQueue[Finding]']:
    monkeypatch.setattr(nvml, '_READ_S', 0.02)
    devices.set(A)
    source = nvml.of_one(A)
    assert source is not None
    found: queue.SimpleQueue[Finding] = queue.SimpleQueue()
    watching = DeviceWatch(source, found.put)
    watching.start()
    yield found
    watching.close()


def test_lost_device_is_reported_by_the_thread(
    devices: Devices, found: 'queue.SimpleQueue[Finding]'
) -> None:
    devices.set(A, lost=True)
    assert found.get().what == 'the driver does not reach it'


def test_library_error_ends_only_the_watch(
    devices: Devices, found: 'queue.SimpleQueue[Finding]', caplog: pytest.LogCaptureFixture
) -> None:
    (watching,) = [one for one in threading.enumerate() if one.name == 'device-watch']
    devices.set(A, action='none that it could be')
    watching.join()
    assert 'GPUs are no longer watched' in caplog.text
    assert found.empty()
