# SPDX-License-Identifier: Apache-2.0
"""When is a window persisted? When every rank and all of its replica holders have all of it.

Ranks tell each other through the launcher's key-value store, on a thread of their own: no training
communicator is used. The rank that completes the count publishes the window.
"""

import logging
import threading
import time
from collections.abc import Callable

from torch.distributed import Store

from moevement_ext.memory.slot import WindowName

logger = logging.getLogger(__name__)

_NEWEST = 'persisted'
_POLL_SECONDS = 0.05


class PersistenceBoard:
    """Counts, over all ranks, which windows are complete.

    Args:
        store: reachable by all ranks; used by this object's thread only.
        rank: of this process; a window counts once for it, also if it is reported again by the
            process that takes its place.
        world_size: number of ranks that must report a window.
        on_persisted: called on the board's thread with each window that became persisted.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        on_persisted: Callable[[WindowName], None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._on_persisted = on_persisted
        self._changed = threading.Condition()
        self._reported: list[WindowName] = []
        self._counted: list[WindowName] = []  # not yet persisted
        self._awaited: WindowName | None = None
        self._newest: WindowName | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name='sparse-ckpt-board', daemon=True)
        self._thread.start()

    def report(self, window: WindowName) -> None:
        """This rank and its replica holders have all of `window`. Never blocks."""
        with self._changed:
            self._reported.append(window)
            self._changed.notify()

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._reported or self._awaited or self._stopping):
                    self._changed.wait()
                if self._stopping:
                    return
                reported, self._reported = self._reported, []
            try:
                self._look()  # what is persisted already is not counted again
                for window in reported:
                    self._count(window)
                self._look()
            except Exception:  # a store that is gone ends the job by itself
                logger.warning('cannot reach the store of the launcher', exc_info=True)
            time.sleep(_POLL_SECONDS)

    def _count(self, window: WindowName) -> None:
        if self._newest is not None and window.start <= self._newest.start:
            return
        self._awaited = window
        self._counted.append(window)
        if self._store.add(self._mark(window), 1) > 1:
            return
        if self._store.add(_key(window), 1) == self._world_size:
            self._store.set(_NEWEST, f'{window.start}/{window.plan}')
            self._store.delete_key(_key(window))  # everybody has counted; keep the store small

    def _look(self) -> None:
        if not self._store.check([_NEWEST]):
            return
        start, plan = self._store.get(_NEWEST).decode().split('/')
        window = WindowName(int(start), plan)
        if window != self._newest:
            self._newest = window
            self._forget_until(window)
            self._on_persisted(window)
        if self._awaited is not None and window.start >= self._awaited.start:
            self._awaited = None

    def _forget_until(self, persisted: WindowName) -> None:
        """Remove the counts of older windows, which some rank skipped and nobody will complete."""
        for window in self._counted:
            if window.start <= persisted.start:
                self._store.delete_key(self._mark(window))
            if window.start < persisted.start:
                self._store.delete_key(_key(window))
        self._counted = [window for window in self._counted if window.start > persisted.start]

    def _mark(self, window: WindowName) -> str:
        return f'{_key(window)}/{self._rank}'


def _key(window: WindowName) -> str:
    return f'complete/{window.start}/{window.plan}'
