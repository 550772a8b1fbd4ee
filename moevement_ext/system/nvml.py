# SPDX-License-Identifier: Apache-2.0
"""Reads devices through NVIDIA's management library (needs `nvidia-ml-py`).

This module neither needs CUDA nor creates a context on a device.
"""

import importlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from moevement_ext.logger import logger_of

logger = logger_of(__name__)

_RESET = 'the driver asks for a reset of the GPU'
_REBOOT = 'the driver asks for a reboot of the node'
# Recovery actions that end the use of a device; others wait for the end of its work.
_ACTIONS = {
    'NVML_GPU_RECOVERY_ACTION_GPU_RESET': _RESET,
    'NVML_GPU_RECOVERY_ACTION_BUS_RESET': _RESET,
    'NVML_GPU_RECOVERY_ACTION_NODE_REBOOT': _REBOOT,
    'NVML_GPU_RECOVERY_ACTION_SYSTEM_REBOOT': _REBOOT,
}
_NO_ROW_LEFT = 'a faulty row of its memory could not be replaced'
_OF_NO_USE = ('NVML_ERROR_GPU_IS_LOST', 'NVML_ERROR_RESET_REQUIRED')


class Finding(NamedTuple):
    """A fault of a device, which no process can use before a reset or a repair."""

    device: str
    """UUID."""
    what: str

    def __str__(self) -> str:
        return f'{self.device}: {self.what}'


class Nvml:
    """Some devices of this node, by UUID; `library` is the initialised `pynvml`. One thread."""

    def __init__(self, library: Any, handles: Mapping[str, Any]) -> None:
        self._nvml = library
        self._handles = dict(handles)
        self._known: set[Finding] | None = None

    def read(self) -> list[Finding]:
        """Lasting faults, at most one of each device.

        A row without a replacement that the first call finds is left out: a device works with it
        until the driver requests a reset, and a worker that it ended may be started there again.
        """
        read = (self._read(device, handle) for device, handle in self._handles.items())
        found = [finding for finding in read if finding is not None]
        if self._known is None:
            self._known = {finding for finding in found if finding.what == _NO_ROW_LEFT}
        return [finding for finding in found if finding not in self._known]

    def shortage(self, devices: Collection[int], sharers: int) -> str:
        """Why processes do not fit on these devices, by index, beside `sharers` equal ones there.

        Empty if they fit, or nothing is known.
        """
        for index, (device, handle) in enumerate(self._handles.items()):
            info = self._or_none(partial(self._nvml.nvmlDeviceGetMemoryInfo, handle))
            needed = 0 if info is None else int(info.used) // sharers
            if info is not None and index in devices and info.free < needed:
                return f'GPU {device} has {info.free} bytes free, and its rank takes {needed}'
        return ''

    def _read(self, device: str, handle: Any) -> Finding | None:
        nvml = self._nvml
        try:
            # This query fails if the device is lost; the others may still succeed.
            self._or_none(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
            fault = self._action(handle)
            rows = self._or_none(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
        except nvml.NVMLError as error:
            lost = self._is_error(error, 'NVML_ERROR_GPU_IS_LOST')
            return Finding(device, 'the driver does not reach it' if lost else _RESET)
        if fault is None and rows is not None and rows[3]:
            fault = _NO_ROW_LEFT
        return None if fault is None else Finding(device, fault)

    def _action(self, handle: Any) -> str | None:
        """The recovery action that the driver requests now; None if there is none."""
        nvml = self._nvml
        field = getattr(nvml, 'NVML_FI_DEV_GET_GPU_RECOVERY_ACTION', 0)
        values = self._or_none(lambda: nvml.nvmlDeviceGetFieldValues(handle, [field]))
        if values is None or values[0].nvmlReturn != nvml.NVML_SUCCESS:
            return None  # missing in this device, driver or library
        known = {getattr(nvml, name, None): action for name, action in _ACTIONS.items()}
        return known.get(int(values[0].value.uiVal))

    def _or_none[T](self, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except self._nvml.NVMLError as error:
            if any(self._is_error(error, name) for name in _OF_NO_USE):
                raise
            return None

    def _is_error(self, error: Any, name: str) -> bool:
        return bool(error.value == getattr(self._nvml, name))


def of_this_node() -> Nvml | None:
    """All devices visible in this environment; None without devices or without the library."""
    library = _library()
    if library is None:
        return None
    handles = _permitted(library)
    found = {library.nvmlDeviceGetUUID(handle): handle for handle in handles}
    seen = visible(list(found), os.environ.get('CUDA_VISIBLE_DEVICES'))
    return Nvml(library, {device: found[device] for device in seen}) if seen else None


def of_one(device: str) -> Nvml | None:
    """One device by UUID; None if the library is missing or does not know the device."""
    library = _library()
    if library is None:
        return None
    try:
        return Nvml(library, {device: library.nvmlDeviceGetHandleByUUID(device)})
    except library.NVMLError as error:
        logger.warning('GPU %s is not watched: %s', device, error)
        return None


def visible(devices: list[str], allowed: str | None) -> Iterable[str]:
    """The devices, in the order of the bus, that `CUDA_VISIBLE_DEVICES` leaves visible.

    `allowed` has indices, or prefixes of UUIDs; None: all. As in CUDA, entries after an invalid
    one are ignored.
    """
    if allowed is None:
        return devices
    found: list[str] = []
    for name in (part.strip() for part in allowed.split(',')):
        if name.isdecimal() and int(name) < len(devices):
            found.append(devices[int(name)])
        elif name.startswith('GPU-') and any(device.startswith(name) for device in devices):
            found.append(next(device for device in devices if device.startswith(name)))
        else:
            break
    return found


def _permitted(library: Any) -> list[Any]:
    """Handles of all devices except those of other jobs, which the library also counts."""
    handles = []
    for index in range(library.nvmlDeviceGetCount()):
        try:
            handles.append(library.nvmlDeviceGetHandleByIndex(index))
        except library.NVMLError as error:
            if error.value != library.NVML_ERROR_NO_PERMISSION:
                raise
    return handles


def _library() -> Any | None:
    """`pynvml`, initialised; None if it is not installed, or without a driver."""
    try:
        library = importlib.import_module('pynvml')
        library.nvmlInit()
    except ModuleNotFoundError:
        return None
    except library.NVMLError:  # no driver
        return None
    return library


_READ_S = 2.0


class DeviceWatch:
    """Reads some devices every two seconds until closed, and reports each fault once.

    From `start` on, only the watching thread uses `source` and calls `found`.
    """

    def __init__(self, source: Nvml, found: Callable[[Finding], None]) -> None:
        self._source = source
        self._found = found
        self._reported: set[Finding] = set()
        self._stopping = threading.Event()

    def poll(self) -> None:
        """Report the faults that are new."""
        for finding in self._source.read():
            if finding not in self._reported:
                self._reported.add(finding)
                self._found(finding)

    def start(self) -> None:
        threading.Thread(target=self._run, name='device-watch', daemon=True).start()

    def close(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(_READ_S):
                self.poll()
        except Exception:  # must not fail training (invariant I6)
            logger.exception('GPUs are no longer watched')
