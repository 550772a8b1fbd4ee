# SPDX-License-Identifier: Apache-2.0
"""The machine of a benchmark, which its figures depend on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil
import torch

_GIB = 1 << 30


class Hardware(msgspec.Struct, frozen=True):
    """Machine and software versions; no names of hosts or folders."""

    processor: str
    cores: int
    memory_gib: float
    gpu: str | None
    load_average: float
    """Load of the last minute at the start of the benchmark: other work on the cores."""
    torch: str
    megatron_core: str

    @classmethod
    def here(cls, gpu: bool) -> 'Hardware':
        return cls(
            processor=_processor(),
            cores=len(os.sched_getaffinity(0)),
            memory_gib=round(psutil.virtual_memory().total / _GIB, 1),
            gpu=torch.cuda.get_device_name() if gpu else None,
            load_average=round(os.getloadavg()[0], 2),
            torch=str(torch.__version__),
            megatron_core=installed('megatron-core'),
        )

    def line(self) -> str:
        device = f'{self.gpu}, ' if self.gpu else ''
        return (
            f'{device}{self.processor}, {self.cores} cores, {self.memory_gib:.0f} GiB, load '
            f'{self.load_average:.1f} at the start; torch {self.torch}, megatron-core '
            f'{self.megatron_core}'
        )


def _processor() -> str:
    for line in Path('/proc/cpuinfo').read_text('utf-8').splitlines():
        if line.startswith('model name'):
            return line.partition(':')[2].strip()
    return platform.machine()


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return 'not installed'
