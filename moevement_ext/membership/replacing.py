# SPDX-License-Identifier: Apache-2.0
"""How a process ends that is never going to train again by itself."""

import logging
import os
import sys
from typing import NoReturn

from torch.distributed import Store

from moevement_ext.errors import EXIT_STUCK
from moevement_ext.membership.rendezvous import break_epoch
from moevement_ext.membership.training_thread import TrainingThread

logger = logging.getLogger(__name__)


def replace_this_process(
    store: Store, epoch: int, rank: int, what: str, thread: TrainingThread | None
) -> NoReturn:
    """End it, so that its launcher starts another in its place. Any thread.

    Args:
        store: the launcher's; a connection of the calling thread.
        epoch: that this process is in, and that ends with it.
        rank: of this process.
        what: is the matter.
        thread: that is in the way, if it is one.
    """
    stack = '' if thread is None else f':\n{thread.stack()}'
    logger.error('sparse checkpointing: rank %d replaces itself: %s%s', rank, what, stack)
    break_epoch(store, epoch, f'rank {rank} is stuck: {what}')
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_STUCK)
