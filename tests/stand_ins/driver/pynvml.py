# SPDX-License-Identifier: Apache-2.0
"""Stands in for `pynvml` (of nvidia-ml-py 13) where there is no driver: devices are files.

`MOEVEMENT_TEST_DEVICES` names a folder with a file `<UUID>.json` for each device, in the order of
their names: what it tells, by the name of the function or field; `lost` if the driver does not
reach it, `forbidden` if it belongs to another job. Without the variable there is no driver. Only
what `moevement_ext/system/nvml.py` uses is here.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

NVML_SUCCESS = 0
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_RESET_REQUIRED = 16
NVML_GPU_RECOVERY_ACTION_NONE = 0
NVML_GPU_RECOVERY_ACTION_GPU_RESET = 1
NVML_GPU_RECOVERY_ACTION_NODE_REBOOT = 2
NVML_GPU_RECOVERY_ACTION_DRAIN_P2P = 3
NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET = 4
NVML_GPU_RECOVERY_ACTION_BUS_RESET = 6
NVML_GPU_RECOVERY_ACTION_SYSTEM_REBOOT = 7
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
NVML_CLOCK_SM = 1


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f'NVML error {value}')
        self.value = value


def nvmlInit() -> None:
    if 'MOEVEMENT_TEST_DEVICES' not in os.environ:
        raise NVMLError(NVML_ERROR_LIBRARY_NOT_FOUND)


def nvmlDeviceGetCount() -> int:
    return len(_files())


def nvmlDeviceGetHandleByIndex(index: int) -> Path:
    device = _files()[index]
    if json.loads(device.read_text()).get('forbidden'):
        raise NVMLError(NVML_ERROR_NO_PERMISSION)
    return device


def nvmlDeviceGetHandleByUUID(uuid: str) -> Path:
    for file in _files():
        if file.stem == uuid:
            return file
    raise NVMLError(NVML_ERROR_NOT_FOUND)


def nvmlDeviceGetUUID(device: Path) -> str:
    return device.stem


def nvmlDeviceGetClockInfo(device: Path, kind: int) -> int:
    assert kind == NVML_CLOCK_SM
    return _of(device, 'clock')


def nvmlDeviceGetFieldValues(device: Path, fields: list[int]) -> list[SimpleNamespace]:
    assert fields == [NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
    return [_action(device)]


def nvmlDeviceGetMemoryInfo(device: Path) -> SimpleNamespace:
    used, free = _of(device, 'memory')
    return SimpleNamespace(used=used, free=free)


def nvmlDeviceGetRemappedRows(device: Path) -> tuple[int, int, int, int]:
    """Corrected, uncorrected, pending; whether a replacement failed."""
    return 0, 1, 0, _of(device, 'no_row_left')


def _files() -> list[Path]:
    return sorted(Path(os.environ['MOEVEMENT_TEST_DEVICES']).glob('*.json'))


def _of(device: Path, name: str | None):  # type: ignore[no-untyped-def]
    told = json.loads(device.read_text())
    if told.get('lost'):
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    if told.get('reset'):
        raise NVMLError(NVML_ERROR_RESET_REQUIRED)
    if name is not None and name not in told:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return told.get(name)


def _action(device: Path) -> SimpleNamespace:
    try:
        value = SimpleNamespace(uiVal=_of(device, 'action'))
    except NVMLError as error:
        if error.value != NVML_ERROR_NOT_SUPPORTED:
            raise
        return SimpleNamespace(nvmlReturn=error.value, value=None)
    return SimpleNamespace(nvmlReturn=NVML_SUCCESS, value=value)
