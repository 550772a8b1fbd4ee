# SPDX-License-Identifier: Apache-2.0
"""Ways for a worker to be stuck, or slow, without being dead."""

import os
import threading

from torch.utils.data import dataloader

from moevement_ext import faults


def loader_of_rank_2_blocks() -> None:
    """For ever, in iteration 8 of its first life."""
    if (os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']) != ('2', '0'):
        return
    iterator = dataloader._SingleProcessDataLoaderIter
    next_data = iterator._next_data

    def blocking(self):
        if faults._iteration >= 8:
            threading.Event().wait()
        return next_data(self)

    iterator._next_data = blocking
