# SPDX-License-Identifier: Apache-2.0
"""Sparse checkpointing for Megatron: the adapter between upstream and the engine."""

from typing import Any

_OF_OTHER_LOOPS = ('TrainingPlan', 'attach')


def __getattr__(name: str) -> Any:
    """`attach` and its parts; not imported before `preflight` and `cpu_device` have had a say."""
    if name in _OF_OTHER_LOOPS:
        from megatron.moevement import attachment

        return getattr(attachment, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
