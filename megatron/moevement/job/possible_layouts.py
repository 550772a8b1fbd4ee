# SPDX-License-Identifier: Apache-2.0
"""Which layouts cannot go on from windows of another one, whatever the windows hold."""

from typing import NamedTuple

from moevement_ext.memory.window.placed import Layout
from moevement_ext.memory.window.refused import RefusedWindow


class Bound(NamedTuple):
    """Settings of a job that bind it to a size of its layout."""

    interleaved: bool
    """The rows of gated experts are mixed (`--moe-mlp-glu-interleave-size`)."""
    own_data: bool
    """Each data-parallel rank shuffles a part of the data (`--dataloader-type cyclic`)."""


def refuse(was: Layout, now: Layout, bound: Bound) -> None:
    """Refuse another division of tensors, which ranges do not describe, or of data.

    Raises:
        RefusedWindow: the layout `now` cannot go on from windows of `was`.
    """
    flag = '--tensor-model-parallel-size'
    if was.tensor != now.tensor:
        raise RefusedWindow(
            f'windows of {was} are divided by {flag} {was.tensor}, and this job by {now.tensor}: '
            f'start with {flag} {was.tensor}, or export a checkpoint (tools.windows export)'
        )
    if bound.interleaved and was.expert_tensor != now.expert_tensor:
        raise RefusedWindow(
            '--moe-mlp-glu-interleave-size mixes the rows of experts: start with '
            f'--expert-tensor-parallel-size {was.expert_tensor}'
        )
    if bound.own_data and was.data != now.data:
        raise RefusedWindow(
            '--dataloader-type cyclic shuffles a part of the data for each data-parallel rank: '
            f'start with {was.data} data-parallel ranks, not {now.data}; a run that had '
            '--no-data-sharding from its first start can change their number'
        )
