# SPDX-License-Identifier: Apache-2.0
import queue
import time

import pytest

from moevement_ext.system import device_watch, nvml
from moevement_ext.system.device_judging import Finding, Harm, Judge
from moevement_ext.system.device_watch import DeviceWatch
from tests.unit.system.conftest import Devices

pytestmark = pytest.mark.timed

A = 'GPU-a1'


@pytest.fixture
def found(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> 'queue.SimpleQueue[Finding]':
    monkeypatch.setattr(device_watch, '_WAIT_S', 0.02)
    devices.set(A)
    source = nvml.of_one(A)
    assert source is not None
    found: queue.SimpleQueue[Finding] = queue.SimpleQueue()
    watching = DeviceWatch(source, Judge(), found.put)
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
