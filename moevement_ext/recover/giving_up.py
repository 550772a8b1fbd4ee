# SPDX-License-Identifier: Apache-2.0
"""Ends a rank in order to restart the whole job."""

import logging
from typing import NoReturn

from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.events import NextTier
from moevement_ext.membership.rank import Rank
from moevement_ext.system.leaving import end_at_once

logger = logging.getLogger(__name__)


def start_the_whole_job_again(rank: Rank, reason: str) -> NoReturn:
    """Take the next tier: all workers end, and the launcher restarts the whole job."""
    rank.events.emit(NextTier(reason=reason, tier='the whole job'))
    logger.warning('sparse checkpointing: the whole job starts again: %s', reason)
    end_at_once(EXIT_WHOLE_JOB)
