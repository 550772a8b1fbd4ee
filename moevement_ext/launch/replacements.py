# SPDX-License-Identifier: Apache-2.0
"""Counts replacements of workers and refuses useless ones."""

import time
from collections.abc import Sequence

from moevement_ext.errors import EXIT_USER_ERROR, LaunchError
from moevement_ext.launch.launch_config import LaunchConfig
from moevement_ext.launch.worker import BadEnd, Worker

_MAX_ERRORS = 3
_ERRORS_WITHIN_S = 600.0


class Replacements:
    """Replacements of single workers in a job, or restarts of all its workers."""

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._count = 0

    def refuse_mistakes(self, ends: Sequence[BadEnd]) -> None:
        """Refuse to replace a worker after a user error, with a `LaunchError`.

        A user error exists from the start, so a new worker would repeat it. After a
        replacement the same exit status may have another cause, such as too little memory
        on one node, and is no longer refused.
        """
        for end in ends:
            if end.code == EXIT_USER_ERROR and self._count == 0:
                raise LaunchError(
                    f'{end.how}: it refuses what it was started with{end.worker.last_words()}',
                    EXIT_USER_ERROR,
                )

    def add(self, end: BadEnd, restarted: Sequence[Worker] = ()) -> None:
        """Count a replacement of `end`'s worker, or a restart of all `restarted` workers.

        Errors count for their own rank. If all workers restart, those of all ranks count together:
        a program that fails by itself may fail on another rank at each restart.

        Raises `LaunchError` if the rank was restarted, or failed, too often.
        """
        if end.is_error:
            end.worker.errors.append(end.at)
            self._refuse_errors(end, restarted)
        # By rank: a lost node, or a whole job that starts again, may be hundreds of them.
        if end.worker.restarts >= self._config.max_restarts:
            raise LaunchError(
                f'{end.how} and --max-restarts {self._config.max_restarts} is used up.'
            )
        self._count += 1

    def _refuse_errors(self, end: BadEnd, restarted: Sequence[Worker]) -> None:
        since = time.monotonic() - _ERRORS_WITHIN_S
        own = sum(at > since for at in end.worker.errors)
        together = {
            worker.rank: sum(at > since for at in worker.errors)
            for worker in restarted
            if any(at > since for at in worker.errors)
        }
        if own >= _MAX_ERRORS:
            failed = f'it failed by itself {own} times'
        elif sum(together.values()) >= _MAX_ERRORS:
            ranks = ', '.join(map(str, sorted(together)))
            failed = f'ranks {ranks} failed by themselves {sum(together.values())} times in all'
        else:
            return
        raise LaunchError(
            f'{end.how}; {failed} within {_ERRORS_WITHIN_S / 60:.0f} minutes'
            f'{end.worker.last_words()}'
        )
