# SPDX-License-Identifier: Apache-2.0
"""A connection to the launcher's store that reconnects after a loss."""

from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store

from moevement_ext.logger import logger_of

logger = logger_of(__name__)

_TIMEOUT = timedelta(seconds=10)
_FIRST_RETRY_SECONDS = 0.2
_LAST_RETRY_SECONDS = 30.0


class StoreConnection:
    """Reconnecting store: torch's store does not reconnect (torch 2.15). Used by one thread.

    The timeout of `store`, a separate connection, is shortened. `consequence` names, for the
    log, the function that is lost while the store is unreachable.
    """

    def __init__(self, store: Store, consequence: str) -> None:
        store.set_timeout(_TIMEOUT)
        self.store = store
        self._consequence = consequence
        self._failures = 0

    def attempt(self, step: Callable[[], object], losses: type[Exception] = Exception) -> float:
        """Run `step`, which uses `store`, once, on a new connection if the last one was lost.

        Only `losses` mean a lost connection. Returns the seconds to wait before another
        attempt; 0 if `step` is done.
        """
        try:
            if self._failures:
                self.store = self.store.clone()
            step()
        except losses as error:
            self._failures += 1
            if self._failures == 1:  # torch itself logs every further attempt
                logger.warning(
                    "the launcher's store is out of reach, %s: %s", self._consequence, error
                )
            return min(_FIRST_RETRY_SECONDS * 2.0 ** min(self._failures, 16), _LAST_RETRY_SECONDS)
        if self._failures:
            logger.warning("the launcher's store is reached again")
        self._failures = 0
        return 0.0
