# SPDX-License-Identifier: Apache-2.0
"""How often workers were replaced, and when that would be in vain."""

import time
from collections.abc import Sequence

from moevement_ext.errors import EXIT_USER_ERROR
from moevement_ext.launch.launch_config import LaunchConfig
from moevement_ext.launch.launch_errors import LaunchError, UserMistake
from moevement_ext.launch.worker import BadEnd, Worker

_MAX_ERRORS = 3
_ERRORS_WITHIN_S = 600.0


class Replacements:
    """Those of a job, or new starts of all its workers together.

    Args:
        config: of the job.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._count = 0

    def refuse_mistakes(self, ends: Sequence[BadEnd]) -> None:
        """Nobody is started again with a mistake of the user: a new process would make it, too.

        It is there from the start. What a replacement refuses, too little memory on another node,
        say, may be in order for the next.

        Raises:
            UserMistake: a worker ended because of one before any was replaced.
        """
        for end in ends:
            if end.code == EXIT_USER_ERROR and self._count == 0:
                raise UserMistake(
                    f'{end.how}: it refuses what it was started with{end.worker.last_words()}'
                )

    def add(self, end: BadEnd, blamed: Sequence[Worker]) -> None:
        """Count one, if it may be and is worth being started.

        Args:
            end: that makes it necessary.
            blamed: whose errors count with this one.

        Raises:
            LaunchError: it is not.
        """
        if end.is_error:
            end.worker.errors.append(end.at)
        errors = [at for worker in blamed for at in worker.errors]
        recent = [at for at in errors if at > time.monotonic() - _ERRORS_WITHIN_S]
        if end.is_error and len(recent) >= _MAX_ERRORS:
            raise LaunchError(
                f'{end.how}; it failed by itself {len(recent)} times within '
                f'{_ERRORS_WITHIN_S / 60:.0f} minutes{end.worker.last_words()}'
            )
        if self._count >= self._config.max_restarts:
            raise LaunchError(
                f'{end.how} and --max-restarts {self._config.max_restarts} is used up.'
            )
        self._count += 1
