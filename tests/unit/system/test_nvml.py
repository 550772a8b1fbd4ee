# SPDX-License-Identifier: Apache-2.0
"""Faults read through NVIDIA's library, here a fake; tests/gpu uses the real library."""

import queue
import sys
import threading
from collections.abc import Iterator

import pytest

from moevement_ext.system import nvml
from moevement_ext.system.nvml import DeviceWatch, Finding
from tests.unit.system.conftest import Devices

pytestmark = [pytest.mark.timed, pytest.mark.timeout(120)]

A, B = 'GPU-a1', 'GPU-b2'
LOST = 'the driver does not reach it'


def read(source: nvml.Nvml | None) -> list[Finding]:
    assert source is not None
    return source.read()


@pytest.mark.parametrize('missing', ['library', 'driver', 'device'])
def test_nothing_is_watched_without_library_driver_or_device(
    missing: str, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == 'library':
        monkeypatch.setitem(sys.modules, 'pynvml', None)
    elif missing == 'driver':
        monkeypatch.delenv('MOEVEMENT_TEST_DEVICES')
    assert nvml.of_this_node() is None
    assert nvml.of_one(A) is None


@pytest.mark.parametrize(
    ('number', 'action'),
    [(1, 'a reset of the GPU'), (2, 'a reboot of the node'), (6, 'a reset of the GPU'),
     (7, 'a reboot of the node'), (0, None), (3, None), (4, None), (5, None)],
)  # fmt: skip
def test_actions_that_end_the_use_of_a_device_are_faults(
    number: int, action: str | None, devices: Devices
) -> None:
    devices.set(A)
    devices.set(B, action=number)
    asked = Finding(B, f'the driver asks for {action}')
    assert read(nvml.of_this_node()) == ([] if action is None else [asked])


def test_failed_replacement_of_a_row_is_a_fault_unless_known_before(devices: Devices) -> None:
    """A process that starts on the device again would otherwise end again and again."""
    devices.set(A)
    source = nvml.of_this_node()
    assert read(source) == []
    devices.set(A, no_row_left=1)
    for _ in range(2):
        assert read(source) == [Finding(A, 'a faulty row of its memory could not be replaced')]
    assert read(nvml.of_this_node()) == []


def test_unsupported_values_are_no_faults(devices: Devices) -> None:
    devices.set(A, clock=None, action=None, no_row_left=None)
    devices.set(B, lost=True)  # of another process
    assert read(nvml.of_one(A)) == []


def test_lost_device_is_read_as_lost(devices: Devices) -> None:
    devices.set(A)
    source = nvml.of_this_node()
    devices.set(A, lost=True)
    assert read(source) == read(nvml.of_this_node()) == [Finding(A, LOST)]
    devices.set(A, reset=True)
    assert read(source) == [Finding(A, 'the driver asks for a reset of the GPU')]


def test_devices_of_other_jobs_are_not_read(devices: Devices) -> None:
    """The library counts them although the job must not use them."""
    devices.set(A, forbidden=True, lost=True)
    devices.set(B, lost=True)
    assert [finding.device for finding in read(nvml.of_this_node())] == [B]


@pytest.mark.parametrize(
    ('allowed', 'found'),
    [
        (None, [A, B]), ('', []), ('1', [B]), ('1,0', [B, A]), ('GPU-b', [B]), ('0,7,1', [A]),
        ('-1', []), ('MIG-1', []),
    ],
)  # fmt: skip
def test_cuda_visible_devices_select_devices(allowed: str | None, found: list[str]) -> None:
    assert list(nvml.visible([A, B], allowed)) == found


def test_each_fault_of_each_device_is_reported_once(devices: Devices) -> None:
    devices.set(A, lost=True)
    devices.set(B)
    source = nvml.of_this_node()
    assert source is not None
    told: list[Finding] = []
    watching = DeviceWatch(source, told.append)
    watching.poll()
    assert [one.device for one in told] == [A], 'a spare node reports it at its first reading'
    devices.set(B, no_row_left=1)
    for _ in range(2):
        watching.poll()
    devices.set(B, action=1)
    watching.poll()
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
