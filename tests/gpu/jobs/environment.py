# SPDX-License-Identifier: Apache-2.0
"""Check: checks packages, private parts of torch, NCCL and memory."""

import os
import platform
import resource
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from moevement_ext.errors import SparseCheckpointError
from moevement_ext.regroup import gloo, internals, nccl_environment
from tests.gpu.jobs.findings import Findings, Settings
from tools.lab.launch import ROOT

GIB = 1 << 30
# Space in the tmpfs that the largest stage needs.
_MEMORY_GIB = 40
_HUGE_PAGES = Path('/sys/kernel/mm/transparent_hugepage/shmem_enabled')


def run(settings: Settings) -> Iterator[Findings]:
    free = shutil.disk_usage(settings.memory).free / GIB
    figures: dict[str, Any] = {
        'python': platform.python_version(),
        'torch': str(torch.__version__),
        **{name: version(name) for name in ('megatron-core', 'msgspec', 'xxhash')},
        'memory_free_gib': free,
        'cores': len(os.sched_getaffinity(0)),
        'locked_limit': resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        'huge_pages': _HUGE_PAGES.read_text().strip() if _HUGE_PAGES.exists() else 'unknown',
    }
    problems = [*_foreign_packages(), *_private_parts(settings)]
    if settings.gpu:
        figures |= _gpu()
        if free < _MEMORY_GIB:
            problems.append(
                f'{settings.memory} has {free:.0f} GiB free, {_MEMORY_GIB} are needed: '
                f'mount -o remount,size=64g {settings.memory}, or give another --memory'
            )
    yield Findings(figures, problems)


def _gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        'gpu': properties.name,
        'gpu_gib': properties.total_memory / GIB,
        'cuda': torch.version.cuda,
        'nccl': '.'.join(map(str, torch.cuda.nccl.version())),
    }


def _foreign_packages() -> list[str]:
    """Problems: other packages with this project's names, which Python would import instead."""
    found = (find_spec(name) for name in ('tools.lab', 'tests.unit.memory.samples'))
    origins = (Path(spec.origin or '') for spec in found if spec is not None)
    return [
        f'{origin} is imported instead of the file in this checkout; remove that package'
        for origin in origins
        if not origin.is_relative_to(ROOT)
    ]


def _private_parts(settings: Settings) -> list[str]:
    """Missing parts of torch that reconnecting process groups needs."""
    try:
        internals.check(internals.PARTS)
        internals.check(gloo.PARTS)
        internals.libtorch()
        if settings.gpu:
            from moevement_ext.regroup import nccl  # some builds of torch have no NCCL

            internals.check(nccl.PARTS)
            nccl_environment.prepare()
    except SparseCheckpointError as error:
        return [str(error)]
    return []
