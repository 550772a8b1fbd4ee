# SPDX-License-Identifier: Apache-2.0
"""Hot spares: start in the background, and replace dead workers."""

import json
import signal
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from moevement_ext.events import Event
from moevement_ext.launch.child import SpawnedChild
from moevement_ext.launch.launch_config import LaunchConfig
from moevement_ext.launch.launcher_events import SpareEnded, SpareMissing, SpareReady
from moevement_ext.launch.loop import FdLoop

_SPARE = Path(__file__).with_name('spare.py')


class SparePool:
    """Processes that import the program in advance.

    Args:
        config: launch configuration of the job.
        environment: of the job; `take` adds the variables of a rank.
        loop: calls this object when a spare is ready or dead.
        report: called with each event.
    """

    def __init__(
        self,
        config: LaunchConfig,
        environment: Mapping[str, str],
        loop: FdLoop,
        report: Callable[[Event], None],
    ) -> None:
        self._config = config
        self._environment = environment
        self._loop = loop
        self._report = report
        self._wanted = 0
        self._importing: list[SpawnedChild] = []
        self._ready: list[SpawnedChild] = []

    def keep(self, count: int) -> None:
        """Keep `count` spares from now on, started in the background; surplus spares stay."""
        self._wanted = count
        self._fill()

    def take(self, environment: Mapping[str, str], log: Path | None) -> SpawnedChild | None:
        """Turn a ready spare into a worker and start another spare; None if no spare is ready.

        Args:
            environment: variables of the rank.
            log: file that the worker appends to; None: the worker prints on its stdout, a pipe.
        """
        order = {
            'argv': [self._config.program, *self._config.flags],
            'env': dict(environment),
            'log': None if log is None else str(log.absolute()),
        }
        for spare in self._ready:
            if spare.tell(json.dumps(order) + '\n'):
                self._ready.remove(spare)
                self._loop.forget(spare.death)
                self._fill()
                return spare
        return None

    @property
    def count(self) -> tuple[int, int]:
        """Number of ready spares, and of starting spares."""
        return len(self._ready), len(self._importing)

    def close(self) -> None:
        """Kill all spares."""
        for spare in [*self._importing, *self._ready]:
            spare.signal(signal.SIGKILL)
            self._drop(spare)
        self._importing.clear()
        self._ready.clear()

    def _fill(self) -> None:
        """Start the missing spares; a failure does not end any worker."""
        while len(self._ready) + len(self._importing) < self._wanted:
            try:
                spare = self._new_spare()
            except OSError as error:  # process limit, file limit or log
                self._wanted -= 1
                self._report(SpareMissing(str(error)))
                continue
            self._importing.append(spare)
            assert spare.output is not None
            self._loop.watch(spare.output, partial(self._heard_from, spare))
            self._loop.watch(spare.death, partial(self._died, spare))

    def _new_spare(self) -> SpawnedChild:
        command = [str(_SPARE), self._config.program]
        start = partial(
            SpawnedChild, command, self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        if self._config.log_dir is None:
            return start(stderr=None)
        with (self._config.log_dir / 'spares.log').open('ab') as log:
            return start(stderr=log)

    def _heard_from(self, spare: SpawnedChild) -> None:
        """Handle the ready byte, or the end of the spare's stdout at its death."""
        assert spare.output is not None
        self._loop.forget(spare.output)
        if spare.hear():
            self._importing.remove(spare)
            self._ready.append(spare)
            self._report(SpareReady(spare.pid))

    def _died(self, spare: SpawnedChild) -> None:
        was_ready = spare in self._ready
        (self._ready if was_ready else self._importing).remove(spare)
        code = self._drop(spare)
        self._report(SpareEnded(spare.pid, code, was_ready))
        if not was_ready:
            self._wanted -= 1  # a further spare would end in the same way
        self._fill()

    def _drop(self, spare: SpawnedChild) -> int:
        assert spare.output is not None
        self._loop.forget(spare.output)
        self._loop.forget(spare.death)
        code = spare.reap()
        spare.close()
        return code
