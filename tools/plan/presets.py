# SPDX-License-Identifier: Apache-2.0
"""What a cluster offers; the models, clusters and rates of failures that `presets.toml` lists."""

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import msgspec

from tools.plan.description import Training
from tools.plan.flags import layers_with_experts
from tools.plan.layout import Batch, Layout
from tools.plan.model import ModelShape
from tools.simulate import fields

GIGA = 10**9


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs. Bytes, seconds; rates are those achieved, not nominal ones.

    Raises:
        FieldError: a field breaks its rule.
    """

    name: str
    gpus_per_node: int
    gpu_memory_bytes: float
    copy_bytes_per_s: float
    """GPU to host memory, per GPU, all GPUs of a node at once."""
    network_bytes_per_s: float
    """Rate out of a node, over all links together."""
    host_memory_bytes: float
    """Memory of a node, for everything."""
    peak_flops: float
    """Operations per second of a GPU in bf16, dense; for iteration times from MFU."""

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
PUBLISHED: dict[str, dict[str, float]] = {
    name: sections['published'] for name, sections in _KNOWN['models'].items()
}
"""By name: 1e9 parameters, `total` and, where they follow from the shape, `active`."""
PRESETS = {name: _training(**sections) for name, sections in _KNOWN['models'].items()}
"""Models by name; the first four are those of the paper's evaluation."""
CLUSTERS = {name: Cluster(name, **figures) for name, figures in _KNOWN['clusters'].items()}
GPU_HOURS_PER_FAILURE: dict[str, float] = _KNOWN['gpu_hours_per_failure']
"""GPU-hours from one failure of a job to the next."""


def mtbf_s(gpu_hours_per_failure: float, gpus: int) -> float:
    """Mean seconds between failures of a job on `gpus` GPUs that fail independently."""
    return gpu_hours_per_failure * 3600 / gpus
