# SPDX-License-Identifier: Apache-2.0
"""Where a rank is in the layout of the job."""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Place(NamedTuple):
    """The place of one rank."""

    stage: int
    """Its stage of the pipeline."""
    members: Sequence[int]
    """All ranks of that stage, in the order of `group`."""
    group: torch.distributed.ProcessGroup | None
    """The group of `members`; None: all ranks of the job."""
    replicas: Sequence[int]
    """Other ranks that hold the same state, bit for bit."""
    interleaved: bool
    """The rank has several model chunks (interleaved schedule), so the last stage sends to the
    first."""
    twins: Sequence[int] = ()
    """Other ranks that capture the same slices, with the same bytes except volatile ones (see
    `capture.layout.TensorSlice`). `replicas` are not twins if each captures a share of the
    state."""
