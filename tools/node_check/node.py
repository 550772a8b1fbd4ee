# SPDX-License-Identifier: Apache-2.0
"""What there is on this node: versions, memory for windows, GPUs."""

import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from moevement_ext.devices import nvml
from moevement_ext.devices.judging import Judge, Reading
from moevement_ext.memory.cgroup import memory_left
from moevement_ext.memory.file_system import is_in_memory

_PACKAGES = ('torch', 'megatron-core', 'transformer-engine', 'msgspec', 'xxhash')
_DRIVER = Path('/sys/module/nvidia/version')


def versions() -> dict[str, str]:
    """Version by name of what must be the same on all nodes; 'none' if it is not installed."""
    found = {'python': platform.python_version(), 'kernel': platform.release()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = 'none'
    if _DRIVER.exists():
        found['driver'] = _DRIVER.read_text('utf-8').strip()
    if torch.cuda.is_available():
        found['gpu'] = torch.cuda.get_device_name()
        found['nccl'] = '.'.join(map(str, torch.cuda.nccl.version()))
    return found


def memory(directory: Path) -> tuple[int, bool]:
    """Bytes that are free for windows, and whether they are in memory.

    Args:
        directory: `--sparse-ckpt-dir`, which need not exist yet.
    """
    there = next(path for path in (directory, *directory.parents) if path.exists())
    free, left = shutil.disk_usage(there).free, memory_left()
    in_memory = is_in_memory(there)
    return free if left is None or not in_memory else min(free, left.nbytes), in_memory


def devices() -> list[str]:
    """What is wrong with GPUs of this node; nothing where nothing tells."""
    source, judge = nvml.of_this_node(), Judge()
    readings: list[Reading] = [] if source is None else source.read()
    return [str(finding) for reading in readings for finding in judge.judge(reading)]


def clock_mhz(device: torch.device) -> int | None:
    """Present clock of the rank's GPU; None without one."""
    if device.type != 'cuda':
        return None
    source = nvml.of_one(f'GPU-{torch.cuda.get_device_properties(device).uuid}')
    return None if source is None else source.read()[0].clock_mhz
