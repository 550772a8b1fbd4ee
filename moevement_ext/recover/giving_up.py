# SPDX-License-Identifier: Apache-2.0
"""How a rank ends when only the whole job can start again."""

import logging
from typing import NoReturn

from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.events import NextTier
from moevement_ext.membership.rank import Rank
from moevement_ext.process.leaving import end_at_once

logger = logging.getLogger(__name__)


def start_the_whole_job_again(rank: Rank, reason: str) -> NoReturn:
    """The next tier: all workers end, and the launcher starts the whole job again."""
    rank.events.emit(NextTier(reason=reason, tier='the whole job'))
    logger.warning('sparse checkpointing: the whole job starts again: %s', reason)
    end_at_once(EXIT_WHOLE_JOB)
