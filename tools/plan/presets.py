# SPDX-License-Identifier: Apache-2.0
"""The resources of a cluster; the models, clusters and failure rates in `presets.toml`."""

import tomllib
from importlib.resources import files
from typing import Any

import msgspec

from ..simulate import fields
from .description import Training
from .flags import layers_with_experts
from .layout import Batch, Layout
from .model import ModelShape

GIGA = 10**9


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Equal nodes of equal GPUs. Units are bytes and seconds; rates are achieved, not nominal."""

    name: str
    gpus_per_node: int
    gpu_memory_bytes: float
    copy_bytes_per_s: float
    """Rate from GPU to host memory, per GPU, with all GPUs of a node active."""
    network_bytes_per_s: float
    """Rate out of a node, over all links."""
    host_memory_bytes: float
    """Total memory of a node."""
    peak_flops: float
    """Dense bf16 operations per second of a GPU; to derive iteration times from MFU."""

    def __post_init__(self) -> None:
        rates = 'copy_bytes_per_s network_bytes_per_s peak_flops'
        sizes = 'gpu_memory_bytes host_memory_bytes'
        fields.check(self, whole='gpus_per_node', positive=f'{sizes} {rates}')


def _training(model: dict[str, Any], experts: dict[str, Any], **others: Any) -> Training:
    pattern = experts.pop('moe_layer_freq', None)
    if pattern is not None:
        experts['moe_layers'] = layers_with_experts(pattern, model['layers'])
    shape = msgspec.convert(model | experts, ModelShape)
    layout = msgspec.convert(others['layout'], Layout)
    return Training(shape, layout, msgspec.convert(others['batch'], Batch))


_KNOWN = tomllib.loads(files(__package__).joinpath('presets.toml').read_text('utf-8'))
PRESETS = {name: _training(**sections) for name, sections in _KNOWN['models'].items()}
"""Models by name; the first four belong to the paper's evaluation."""
CLUSTERS = {name: Cluster(name, **figures) for name, figures in _KNOWN['clusters'].items()}
GPU_HOURS_PER_FAILURE: dict[str, float] = _KNOWN['gpu_hours_per_failure']
"""GPU-hours between failures of a job."""


def mtbf_s(gpu_hours_per_failure: float, gpus: int) -> float:
    """Mean seconds between failures of a job on `gpus` GPUs with independent failures."""
    return gpu_hours_per_failure * 3600 / gpus
