# SPDX-License-Identifier: Apache-2.0
"""Whose fault is an exception: this rank's own, or that of another rank that is gone?"""

from torch.distributed import DistError

from moevement_ext.membership.rendezvous import EpochBroken
from moevement_ext.recover.sources import ArrivalStopped
from moevement_ext.regroup.process_groups import RegroupError
from moevement_ext.replicate.log_reader import ReaderClosed


def lost_peer(error: BaseException) -> bool:
    """True if an exception says that another rank is gone, not that this one is at fault.

    gloo names its transport in every message; NCCL, the stores, and what windows and logs are
    fetched by have types of their own.
    """
    known = EpochBroken | RegroupError | DistError | ConnectionError | ReaderClosed | ArrivalStopped
    if isinstance(error, known):
        return True
    return isinstance(error, RuntimeError) and 'gloo' in str(error).lower()
