# SPDX-License-Identifier: Apache-2.0
"""Faults read through NVIDIA's library, here a fake; tests/gpu uses the real library."""

import sys

import pytest

from moevement_ext.system import nvml
from moevement_ext.system.device_judging import Finding, Harm, of_xid
from tests.unit.system.conftest import Devices

A, B = 'GPU-a1', 'GPU-b2'
LOST = 'the driver does not reach it'


def read(source: nvml.Nvml | None) -> list[Finding]:
    assert source is not None
    return source.read()


def test_missing_library_disables_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, 'pynvml', None)
    assert nvml.of_this_node() is None
    assert nvml.of_one(A) is None


def test_missing_driver_disables_the_watch(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv('MOEVEMENT_TEST_DEVICES')
    assert nvml.of_this_node() is None
    assert nvml.of_one(A) is None


def test_unknown_device_disables_the_watch(devices: Devices) -> None:
    assert nvml.of_this_node() is None
    assert nvml.of_one(A) is None


def test_all_devices_are_read(devices: Devices) -> None:
    devices.set(A)
    devices.set(B, action=4)
    requested = 'the driver asks for a reset of the GPU once its work is done'
    assert read(nvml.of_this_node()) == [Finding(B, Harm.WORN, requested)]


@pytest.mark.parametrize(
    ('number', 'harm', 'action'),
    [(1, Harm.DEVICE, 'a reset of the GPU'), (2, Harm.DEVICE, 'a reboot of the node'),
     (3, Harm.WORN, 'an end of peer-to-peer traffic'), (5, Harm.WORN, 'an action unknown here'),
     (6, Harm.DEVICE, 'a reset of the GPU'), (7, Harm.DEVICE, 'a reboot of the node')],
)  # fmt: skip
def test_recovery_action_codes_are_mapped(
    number: int, harm: Harm, action: str, devices: Devices
) -> None:
    devices.set(A, action=number)
    assert read(nvml.of_one(A)) == [Finding(A, harm, f'the driver asks for {action}')]


def test_unsupported_values_are_no_faults(devices: Devices) -> None:
    """As with a consumer GPU or an older driver."""
    devices.set(A, clock=None, action=None)
    assert read(nvml.of_one(A)) == []


def test_lost_device_is_read_as_lost(devices: Devices) -> None:
    devices.set(A)
    source = nvml.of_this_node()
    devices.set(A, lost=True)
    assert read(source) == [Finding(A, Harm.DEVICE, LOST)]
    devices.set(A, reset=True)
    assert read(source) == [Finding(A, Harm.DEVICE, 'the driver asks for a reset of the GPU')]


def test_errors_are_received_as_they_happen(devices: Devices) -> None:
    devices.set(A)
    devices.set(B)
    devices.fail(B, 13)
    source = nvml.of_this_node()
    assert source is not None
    assert source.wait(0.05) is None
    devices.fail(B, 79)
    assert source.wait(20.0) == [of_xid(B, 79)]
    assert source.wait(0.05) is None


def test_source_of_one_device_ignores_others(devices: Devices) -> None:
    devices.set(A)
    devices.set(B, lost=True)
    source = nvml.of_one(A)
    assert source is not None
    devices.fail(B, 79)
    assert source.wait(0.05) is None
    assert source.read() == []


def test_device_lost_at_the_start_is_read_as_lost(devices: Devices) -> None:
    devices.set(A, lost=True)
    source = nvml.of_this_node()
    assert source is not None
    assert source.wait(0.01) is None
    assert source.read() == [Finding(A, Harm.DEVICE, LOST)]


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
