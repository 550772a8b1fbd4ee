# SPDX-License-Identifier: Apache-2.0
"""What a cluster offers: memory, links, and how often it fails."""

from dataclasses import dataclass

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
        fields.whole('gpus_per_node', self.gpus_per_node)
        for name in (
            'gpu_memory_bytes',
            'copy_bytes_per_s',
            'network_bytes_per_s',
            'host_memory_bytes',
            'peak_flops',
        ):
            fields.positive(name, getattr(self, name))


CLUSTERS = {
    # Eight A100-80GB; PCIe 4 (25 of nominal 32 GB/s); eight 200 Gb/s links, nine tenths achieved.
    'a100': Cluster('a100', 8, 80 * GIGA, 25 * GIGA, 180 * GIGA, 2000 * GIGA, 312e12),
    # The same GPUs behind 80 Gb/s a node, as in the paper's evaluation; host memory is assumed.
    'a100-80gbit': Cluster('a100-80gbit', 8, 80 * GIGA, 25 * GIGA, 10 * GIGA, 1900 * GIGA, 312e12),
    # Eight H100-80GB; PCIe 5; eight 400 Gb/s links of which 45 GB/s each are achieved.
    'h100': Cluster('h100', 8, 80 * GIGA, 53 * GIGA, 360 * GIGA, 2000 * GIGA, 989e12),
}
"""Presets by name."""

GPU_HOURS_PER_FAILURE = {
    # Interruptions over GPU-hours of published training runs.
    'opt-175b': 7_500.0,
    'projection-131k': 30_000.0,  # one interruption in 14 minutes on 131,072 GPUs
    'llama-3': 50_000.0,  # 419 unexpected interruptions in 54 days on 16,384 GPUs
}
"""Presets by name, in GPU-hours from one failure of a job to the next."""


def mtbf_s(gpu_hours_per_failure: float, gpus: int) -> float:
    """Mean seconds between failures of a job on `gpus` GPUs that fail independently."""
    return gpu_hours_per_failure * 3600 / gpus
