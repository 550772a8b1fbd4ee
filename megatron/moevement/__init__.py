# SPDX-License-Identifier: Apache-2.0
"""Sparse checkpointing for Megatron: the adapter between upstream and the engine."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.moevement.attachment import attach
    from megatron.moevement.job.declared import TrainingPlan
    from moevement_ext.config import SparseCheckpointConfig

__all__ = ['SparseCheckpointConfig', 'TrainingPlan', 'attach']


def __getattr__(name: str) -> Any:
    """Import a public name on first use: `starting` and `cpu_device` must run before upstream."""
    if name in __all__:
        from megatron.moevement import attachment

        return getattr(attachment, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
