# SPDX-License-Identifier: Apache-2.0
"""Ranks whose store is lost in a certain iteration."""

import os

from torch.utils.data import dataloader

from moevement_ext import faults
from moevement_ext.membership.store_loss import StoreLoss
from moevement_ext.protect.checkpointer import SparseCheckpointer


def waits_in_iteration_7_until_the_store_is_lost() -> None:
    """Rank 0, in its first attempt; the window of the states after 6, 7 and 8 has begun."""
    made: list[StoreLoss] = []
    construct = StoreLoss.__init__

    def remembering(self, *args):
        construct(self, *args)
        made.append(self)

    StoreLoss.__init__ = remembering
    iterator = dataloader._SingleProcessDataLoaderIter
    next_data = iterator._next_data

    def waiting(self):
        attempt = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']
        if faults._iteration == 7 and attempt == ('0', '0'):
            made[0].lost.wait()
        return next_data(self)

    iterator._next_data = waiting


def ends_in_the_middle_of_a_window() -> None:
    """The same, and no rank trains to its end."""
    waits_in_iteration_7_until_the_store_is_lost()
    SparseCheckpointer.window_under_way = False
