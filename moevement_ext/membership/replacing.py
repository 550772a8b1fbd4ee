# SPDX-License-Identifier: Apache-2.0
"""Ends a process that can never train again, so that its launcher replaces it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from torch.distributed import DistError, Store

from moevement_ext.errors import EXIT_STUCK
from moevement_ext.logger import logger_of
from moevement_ext.membership.rendezvous import end_round
from moevement_ext.membership.training_thread import TrainingThread
from moevement_ext.system.leaving import end_at_once

logger = logger_of(__name__)


def replace_this_process(
    store: Store, round: int, rank: int, what: str, thread: TrainingThread | None
) -> NoReturn:
    """End this process and its round, so that its launcher starts another one. Any thread.

    `store` is a connection of the calling thread; `what` is the reason; `thread` is the stuck
    thread, if any.
    """
    _say(rank, what, thread)
    with suppress(DistError):  # its launcher detects the exit
        end_round(store, round, f'rank {rank} is stuck: {what}')
    end_at_once(EXIT_STUCK)


@contextmanager
def ends_within(limit_s: float, rank: int, thread: TrainingThread | None) -> Iterator[None]:
    """End this process if the code in the context, which ends the waits of `thread`, takes longer.

    No other rank could detect that, as this rank still sends heartbeats.
    """
    done = threading.Event()

    def wait() -> None:
        if not done.wait(limit_s):
            _say(rank, f'its waits have not ended within {limit_s:g} s', thread)
            end_at_once(EXIT_STUCK)

    threading.Thread(target=wait, name='sparse-ckpt-limit', daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _say(rank: int, what: str, thread: TrainingThread | None) -> None:
    stack = '' if thread is None else f':\n{thread.stack()}'
    logger.error('rank %d replaces itself: %s%s', rank, what, stack)
