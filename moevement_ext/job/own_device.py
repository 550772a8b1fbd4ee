# SPDX-License-Identifier: Apache-2.0
"""The GPU of this process: choice, CPU binding and monitoring.

A process that loses its GPU ends, so that no collective hangs on that GPU. The launcher then
replaces the process and decides whether the device is usable; the launcher for Slurm watches all
devices of its nodes.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from moevement_ext.events import DeviceProblem, EventLog
from moevement_ext.logger import logger_of
from moevement_ext.system import nvml, process_setup
from moevement_ext.system.nvml import DeviceWatch, Finding

logger = logger_of(__name__)


def take() -> None:
    """Select the visible GPU with index `LOCAL_RANK`, unless the process has selected one.

    Training thread, before any tensor is on a device.
    """
    if not torch.cuda.is_available() or torch.cuda.current_device() != 0:
        return
    local_rank = int(os.environ.get('LOCAL_RANK', '0'))
    if 0 < local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)


def bind() -> None:
    """Bind to the CPUs near the GPU, if there is one. Training thread, before the first window."""
    if not torch.cuda.is_available():
        return
    found: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    if not hasattr(found, 'pci_bus_id'):  # missing in some builds of torch
        return
    address = f'{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0'
    cpus = process_setup.bind(address)
    if cpus is not None:
        logger.info('bound to the %d CPUs near GPU %s', len(cpus), address)


def watch(events: EventLog, lose: Callable[[str], None]) -> DeviceWatch | None:
    """Start watching the GPU; None without a GPU or without NVML. Training thread.

    `lose` is called on the watching thread with the fault; it ends the process.
    """
    source = _own()
    if source is None:
        return None
    watching = DeviceWatch(source, partial(_act, events, lose))
    watching.start()
    return watching


def _own() -> nvml.Nvml | None:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return nvml.of_one(f'GPU-{properties.uuid}')


def _act(events: EventLog, lose: Callable[[str], None], finding: Finding) -> None:
    events.emit(DeviceProblem(device=finding.device, what=finding.what))
    logger.warning('GPU %s', finding)
    lose(finding.what)
