# SPDX-License-Identifier: Apache-2.0
"""How a rank ends when only the whole job can start again."""

import logging
import os
import sys
from typing import NoReturn

from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.events import NextTier
from moevement_ext.membership.rank import Rank

logger = logging.getLogger(__name__)


def start_the_whole_job_again(rank: Rank, reason: str) -> NoReturn:
    """The next tier: all workers end, and the launcher starts the whole job again."""
    rank.events.emit(NextTier(reason=reason, tier='the whole job'))
    logger.warning('sparse checkpointing: the whole job starts again: %s', reason)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_WHOLE_JOB)
