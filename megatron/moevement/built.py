# SPDX-License-Identifier: Apache-2.0
"""Type aliases for the objects that upstream builds.

Upstream ships no type information, so these names serve readers more than the type checker.
"""

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

__all__ = [
    'Built',
    'Chunks',
    'DistributedDataParallel',
    'MegatronOptimizer',
    'OptimizerParamScheduler',
    'TransformerConfig',
]

Chunks = list[DistributedDataParallel]
"""Model chunks of a rank: one, or several in an interleaved schedule."""

Built = tuple[Chunks, MegatronOptimizer, OptimizerParamScheduler]
"""Model chunks, optimizer and scheduler."""
