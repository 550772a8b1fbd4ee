# SPDX-License-Identifier: Apache-2.0
"""Findings of sequences of errors and states that NVIDIA's documents describe."""

import queue
import time

import pytest

from moevement_ext.system import device_watch, nvml
from moevement_ext.system.device_judging import Finding, Harm
from moevement_ext.system.device_watch import DeviceWatch
from tests.unit.system.conftest import Devices

pytestmark = pytest.mark.timed

A, B = 'GPU-a1', 'GPU-b2'


def sequence(devices: Devices, *steps: int | dict) -> list[list[Finding]]:
    """Findings at each step: an Xid, or a state that is read."""
    devices.set(A)
    source = nvml.of_one(A)
    assert source is not None
    told: list[Finding] = []
    watching = DeviceWatch(source, told.append)
    found = []
    for step in steps:
        if isinstance(step, int):
            devices.fail(A, step)
            assert watching._hear()
        else:
            devices.set(A, **step)
            watching.look()
        found.append(told.copy())
        told.clear()
    assert all(finding.device == A for findings in found for finding in findings)
    return found


def harms(found: list[list[Finding]]) -> list[Harm | None]:
    """The harm of each step."""
    assert all(len(findings) <= 1 for findings in found)
    return [findings[0].harm if findings else None for findings in found]


def test_sound_device_has_no_findings(devices: Devices) -> None:
    assert sequence(devices, {}, {}, {'action': None}, {}) == [[], [], [], []]


def test_device_that_falls_off_the_bus_is_reported(devices: Devices) -> None:
    """Xid 79, the accompanying change of the recovery action, and a lost device."""
    found = sequence(devices, {}, 79, 154, {'lost': True}, {'lost': True})
    assert harms(found) == [None, Harm.DEVICE, None, Harm.DEVICE, None]


def test_contained_memory_error_harms_the_process_only(devices: Devices) -> None:
    """The process ends and the device stays usable; a reset is due later."""
    found = sequence(devices, {}, 94, 63, 45, {'action': 4}, {'action': 4})
    assert harms(found) == [None, Harm.PROCESS, Harm.WORN, Harm.NOTED, Harm.WORN, None]
    assert found[4][0].what == 'the driver asks for a reset of the GPU once its work is done'


def test_uncontained_memory_error_harms_the_device(devices: Devices) -> None:
    found = sequence(devices, {}, 48, 95, {'action': 1}, {'action': 1})
    assert harms(found) == [None, Harm.DEVICE, Harm.DEVICE, Harm.DEVICE, None]


def test_fault_before_the_first_reading_is_reported(devices: Devices) -> None:
    """A spare node reports it at its first reading."""
    assert harms(sequence(devices, {'action': 2})) == [Harm.DEVICE]
    assert harms(sequence(devices, {'action': 3})) == [Harm.WORN]


def test_devices_are_judged_separately(devices: Devices) -> None:
    devices.set(A, lost=True)
    devices.set(B, lost=True)
    source = nvml.of_this_node()
    assert source is not None
    told: list[Finding] = []
    watching = DeviceWatch(source, told.append)
    watching.look()
    watching.look()
    assert [(finding.device, finding.harm) for finding in told] == [
        (A, Harm.DEVICE), (B, Harm.DEVICE),
    ]  # fmt: skip


@pytest.fixture
def found(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> 'queue.SimpleQueue[Finding]':
    monkeypatch.setattr(device_watch, '_WAIT_S', 0.02)
    devices.set(A)
    source = nvml.of_one(A)
    assert source is not None
    found: queue.SimpleQueue[Finding] = queue.SimpleQueue()
    watching = DeviceWatch(source, found.put)
    watching.start()
    yield found
    watching.close()


def test_errors_and_states_are_reported_once(
    devices: Devices, found: 'queue.SimpleQueue[Finding]'
) -> None:
    devices.fail(A, 13)
    assert found.get(timeout=120.0) == Finding(A, Harm.NOTED, 'Xid 13')
    devices.set(A, action=4)
    assert found.get(timeout=120.0).harm is Harm.WORN
    devices.fail(A, 13)  # the same error again
    assert found.get(timeout=120.0) == Finding(A, Harm.NOTED, 'Xid 13')
    devices.set(A, lost=True)
    assert found.get(timeout=120.0).harm is Harm.DEVICE
    assert found.empty()


def test_library_error_ends_only_the_watch(
    devices: Devices, found: 'queue.SimpleQueue[Finding]', caplog: pytest.LogCaptureFixture
) -> None:
    devices.set(A, action='none that it could be')
    deadline = time.monotonic() + 120.0
    while 'GPUs are no longer watched' not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert found.empty()
