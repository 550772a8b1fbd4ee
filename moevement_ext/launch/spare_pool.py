# SPDX-License-Identifier: Apache-2.0
"""Keeps hot spares, of which workers are forks, or which become workers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from moevement_ext.events import Event
from moevement_ext.launch.child import Child, FdLoop
from moevement_ext.launch.launch_config import LaunchConfig
from moevement_ext.launch.launcher_events import SpareEnded, SpareMissing, SpareReady
from moevement_ext.launch.template import Template, TemplateLost


@dataclass(eq=False)
class SparePool:
    """Processes that import the program in advance.

    A spare that can fork serves any number of workers, the first ones too. If the program cannot be
    forked, as its import starts threads or uses a GPU, each spare becomes one worker.
    `environment` is that of the import; `loop` calls this object when a spare is ready or dead, and
    this calls `then` afterwards.
    """

    _config: LaunchConfig
    _environment: Mapping[str, str]
    _loop: FdLoop
    _report: Callable[[Event], None]
    _then: Callable[[], None]

    def __post_init__(self) -> None:
        self._asked = self._wanted = 0
        # Set once a spare has reported that it cannot fork.
        self._each_is_one = False
        # The last import has failed, as the workers' may not.
        self._failed = False
        self._importing: list[Template] = []
        self._ready: list[Template] = []

    def keep(self, count: int) -> None:
        """Be ready for `count` workers from now on; surplus spares stay."""
        self._asked = self._wanted = count
        self._fill()

    def retry(self) -> None:
        """Start missing spares again, as the reason for their failure may be gone."""
        self._wanted = self._asked
        self._fill()

    def take(self, environment: Mapping[str, str], output: BinaryIO) -> Child | None:
        """Start a worker with this complete environment from a ready spare; None without one.

        Raises `OSError` if there is no room for another process.
        """
        command = [self._config.program, *self._config.flags]
        for spare in self._ready:
            try:
                child = spare.start(command, environment, output)
            except TemplateLost:
                continue  # the loop handles the death of the spare next
            if not spare.forks:
                self._ready.remove(spare)
                self._loop.forget(spare.process.death)
                self._fill()
            return child
        return None

    @property
    def is_awaited(self) -> bool:
        """True while workers should wait for a spare, which saves them the import."""
        serves_all = not (self._each_is_one or self._failed)
        return serves_all and bool(self._importing) and not self._ready

    @property
    def count(self) -> tuple[int, int]:
        """Number of ready spares, and of starting spares."""
        return len(self._ready), len(self._importing)

    def close(self) -> None:
        """Kill all spares, not the workers that they have forked."""
        for spare in [*self._importing, *self._ready]:
            self._drop(spare)
        self._importing.clear()
        self._ready.clear()

    def _fill(self) -> None:
        """Start the missing spares; a failure does not end any worker."""
        config = self._config
        while len(self._ready) + len(self._importing) < self._needed:
            try:
                with config.log_of_spares() as log:
                    of_program = config.program, config.flags
                    spare = Template.spawn(*of_program, self._environment, log)
            except OSError as error:  # process limit, file limit or log
                self._wanted -= 1
                self._report(SpareMissing(str(error)))
                continue
            self._importing.append(spare)
            self._loop.watch(spare.fd, partial(self._on_message, spare))
            self._loop.watch(spare.process.death, partial(self._died, spare))

    @property
    def _needed(self) -> int:
        return self._wanted if self._each_is_one else min(self._wanted, 1)

    def _on_message(self, spare: Template) -> None:
        """Record that a spare is ready; ignore a connection that ended, as at the spare's death."""
        self._loop.forget(spare.fd)
        if spare.handle_message():
            self._importing.remove(spare)
            self._ready.append(spare)
            self._report(SpareReady(spare.process.pid, bool(spare.forks)))
            self._each_is_one = not spare.forks
            self._failed = False
            self._fill()
            self._then()

    def _died(self, spare: Template) -> None:
        was_ready = spare in self._ready
        (self._ready if was_ready else self._importing).remove(spare)
        pid, code = spare.process.pid, self._drop(spare)
        self._report(SpareEnded(pid, code, was_ready))
        if not was_ready:
            self._failed = True
            self._wanted -= 1  # another spare would end in the same way now
        self._fill()
        self._then()

    def _drop(self, spare: Template) -> int:
        self._loop.forget(spare.fd)
        self._loop.forget(spare.process.death)
        return spare.close()
