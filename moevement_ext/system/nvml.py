# SPDX-License-Identifier: Apache-2.0
"""Reads devices through NVIDIA's management library (needs `nvidia-ml-py`).

This module neither needs CUDA nor creates a context on a device.
"""

import importlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moevement_ext.system.device_judging import Finding, Harm, of_xid

logger = logging.getLogger(__name__)

_RESET = (Harm.DEVICE, 'a reset of the GPU')
_REBOOT = (Harm.DEVICE, 'a reboot of the node')
# Recovery actions that the driver requests for a device.
_ACTIONS = {
    'NVML_GPU_RECOVERY_ACTION_NONE': None,
    'NVML_GPU_RECOVERY_ACTION_GPU_RESET': _RESET,
    'NVML_GPU_RECOVERY_ACTION_BUS_RESET': _RESET,
    'NVML_GPU_RECOVERY_ACTION_NODE_REBOOT': _REBOOT,
    'NVML_GPU_RECOVERY_ACTION_SYSTEM_REBOOT': _REBOOT,
    'NVML_GPU_RECOVERY_ACTION_DRAIN_P2P': (Harm.WORN, 'an end of peer-to-peer traffic'),
    'NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET': (
        Harm.WORN,
        'a reset of the GPU once its work is done',
    ),
}
_OTHER = (Harm.WORN, 'an action unknown here')
# Xid that accompanies another one; the recovery action of the device must be read again.
_ACTION_CHANGED = 154
_OF_NO_USE = ('NVML_ERROR_GPU_IS_LOST', 'NVML_ERROR_RESET_REQUIRED')


class Nvml:
    """Some devices of this node, by UUID; `library` is the initialised `pynvml`. One thread."""

    def __init__(self, library: Any, handles: Mapping[str, Any]) -> None:
        self._nvml = library
        self._handles = dict(handles)
        self._events = library.nvmlEventSetCreate()
        self._hears = False
        for device, handle in self._handles.items():
            self._listen_to(device, handle)

    def wait(self, timeout_s: float) -> list[Finding] | None:
        """Wait at most `timeout_s` for an Xid and return its fault, if any; None: no Xid."""
        if not self._hears:
            time.sleep(timeout_s)
            return None
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, int(timeout_s * 1000))
        except self._nvml.NVMLError as error:
            if self._says(error, 'NVML_ERROR_TIMEOUT'):
                return None
            # The error does not name the lost device; the next reading shows it.
            logger.warning('errors of the GPUs are no longer listened for: %s', error)
            self._hears = False
            return None
        device = self._nvml.nvmlDeviceGetUUID(event.device)
        xid = int(event.eventData)
        return [] if xid == _ACTION_CHANGED else [of_xid(device, xid)]

    def read(self) -> list[Finding]:
        """Lasting faults, at most one of each device."""
        found = (self._read(device, handle) for device, handle in self._handles.items())
        return [finding for finding in found if finding is not None]

    def _listen_to(self, device: str, handle: Any) -> None:
        xids = self._nvml.nvmlEventTypeXidCriticalError
        try:
            self._nvml.nvmlDeviceRegisterEvents(handle, xids, self._events)
            self._hears = True
        except self._nvml.NVMLError as error:
            logger.warning('GPU %s does not report errors as they happen: %s', device, error)

    def _read(self, device: str, handle: Any) -> Finding | None:
        nvml = self._nvml
        try:
            # This query fails if the device is lost; the query of the action may still succeed.
            self._told(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
            requested = self._action(handle)
        except nvml.NVMLError as error:
            if self._says(error, 'NVML_ERROR_GPU_IS_LOST'):
                return Finding(device, Harm.DEVICE, 'the driver does not reach it')
            requested = _RESET
        if requested is None:
            return None
        harm, action = requested
        return Finding(device, harm, f'the driver asks for {action}')

    def _action(self, handle: Any) -> tuple[Harm, str] | None:
        """The recovery action that the driver requests, with its harm; None if there is none."""
        nvml = self._nvml
        field = getattr(nvml, 'NVML_FI_DEV_GET_GPU_RECOVERY_ACTION', 0)
        values = self._told(lambda: nvml.nvmlDeviceGetFieldValues(handle, [field]))
        if values is None or values[0].nvmlReturn != nvml.NVML_SUCCESS:
            return None  # missing in this device, driver or library
        known = {getattr(nvml, name, None): action for name, action in _ACTIONS.items()}
        return known.get(int(values[0].value.uiVal), _OTHER)

    def _told[T](self, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except self._nvml.NVMLError as error:
            if any(self._says(error, name) for name in _OF_NO_USE):
                raise
            return None

    def _says(self, error: Any, name: str) -> bool:
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
