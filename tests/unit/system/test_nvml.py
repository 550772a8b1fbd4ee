# SPDX-License-Identifier: Apache-2.0
"""Readings through NVIDIA's library, here a fake; tests/gpu uses the real library."""

import sys

import pytest

from moevement_ext.system import nvml
from moevement_ext.system.device_judging import Action, Reading
from tests.unit.system.conftest import Devices

A, B = 'GPU-a1', 'GPU-b2'


def read(source: nvml.Nvml | None) -> list[Reading]:
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


def test_readings_of_all_devices(devices: Devices) -> None:
    devices.set(A)
    devices.set(B, action=4, clock=600)
    sound, bad = read(nvml.of_this_node())
    assert sound == Reading(A, action=Action.NONE, clock_mhz=1980)
    assert bad == Reading(B, action=Action.DRAIN_AND_RESET, clock_mhz=600)


@pytest.mark.parametrize(
    ('number', 'action'),
    [(1, Action.GPU_RESET), (2, Action.NODE_REBOOT), (3, Action.DRAIN_P2P), (5, Action.OTHER),
     (6, Action.GPU_RESET), (7, Action.NODE_REBOOT)],
)  # fmt: skip
def test_recovery_action_codes_are_mapped(number: int, action: Action, devices: Devices) -> None:
    devices.set(A, action=number)
    (reading,) = read(nvml.of_one(A))
    assert reading.action is action


def test_unsupported_values_are_missing(devices: Devices) -> None:
    """As with a consumer GPU or an older driver."""
    devices.set(A, clock=None, action=None)
    (reading,) = read(nvml.of_one(A))
    assert reading == Reading(A)


def test_lost_device_is_read_as_lost(devices: Devices) -> None:
    devices.set(A)
    source = nvml.of_this_node()
    devices.set(A, lost=True)
    (reading,) = read(source)
    assert reading == Reading(A, lost=True)
    devices.set(A, reset=True)
    (reading,) = read(source)
    assert (reading.lost, reading.action) == (False, Action.GPU_RESET)


def test_errors_are_received_as_they_happen(devices: Devices) -> None:
    devices.set(A)
    devices.set(B)
    devices.fail(B, 13)
    source = nvml.of_this_node()
    assert source is not None
    assert source.wait(0.05) is None
    devices.fail(B, 79)
    heard = source.wait(20.0)
    assert heard is not None
    assert (heard.device, heard.xids) == (B, (79,))
    assert source.wait(0.05) is None


def test_source_of_one_device_ignores_others(devices: Devices) -> None:
    devices.set(A)
    devices.set(B, lost=True)
    source = nvml.of_one(A)
    assert source is not None
    devices.fail(B, 79)
    assert source.wait(0.05) is None
    assert [reading.device for reading in source.read()] == [A]


def test_device_lost_at_the_start_is_read_as_lost(devices: Devices) -> None:
    devices.set(A, lost=True)
    source = nvml.of_this_node()
    assert source is not None
    assert source.wait(0.01) is None
    assert source.read()[0].lost


def test_devices_of_other_jobs_are_not_read(devices: Devices) -> None:
    """The library counts them although the job must not use them."""
    devices.set(A, forbidden=True)
    devices.set(B)
    assert [reading.device for reading in read(nvml.of_this_node())] == [B]


@pytest.mark.parametrize(
    ('allowed', 'found'),
    [
        (None, [A, B]), ('', []), ('1', [B]), ('1,0', [B, A]), ('GPU-b', [B]), ('0,7,1', [A]),
        ('-1', []), ('MIG-1', []),
    ],
)  # fmt: skip
def test_cuda_visible_devices_select_devices(allowed: str | None, found: list[str]) -> None:
    assert list(nvml.visible([A, B], allowed)) == found
