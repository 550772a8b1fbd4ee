# SPDX-License-Identifier: Apache-2.0
"""How a process of a Megatron job takes its place, before `torch.distributed` is initialised."""

from datetime import timedelta
from typing import Any

from torch.distributed import Store

from megatron.moevement.job import identity
from megatron.moevement.job.unsupported import not_localized
from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.job import joining
from moevement_ext.membership.membership import Membership


def join(
    args: Any, config: SparseCheckpointConfig, timeout: timedelta
) -> tuple[Membership | None, Store | None]:
    """Meet the other ranks; see `moevement_ext.job.joining.join`."""
    return joining.join(
        identity.rank_identity(args, config),
        args.world_size,
        identity.run_name(args, config),
        config,
        timeout,
        not_localized(args),
    )
