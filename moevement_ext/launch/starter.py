# SPDX-License-Identifier: Apache-2.0
"""How the workers of a job come to life: on this machine, or by agents on other nodes."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from moevement_ext.launch.remote import RemoteChild
from moevement_ext.memory.node_store import NodeStore


class Starter(Protocol):
    """What starts workers for the supervisor; used by its thread alone."""

    def open(self, port: int) -> None:
        """Be ready for workers that meet in the store at `port`; again if there is a new one."""

    def start(
        self, rank: int, restarts: int, heard: Callable[[int], None] | None = None
    ) -> RemoteChild:
        """A new life of a rank, reported once there is a process.

        Args:
            rank: of the worker.
            restarts: how often it was restarted.
            heard: called with the iterations that it logs, if it has no log.
        """

    def keep_spares(self) -> None:
        """All workers are started: so may be hot spares, which have time."""

    def spares_left(self) -> str:
        """What is ready to take the place of the next that is lost, in words."""

    def look(self) -> None:
        """Do what is due; called ten times a second.

        Raises:
            LaunchError: a worker cannot be started.
        """

    def lose_node(self, node: int, memory: Callable[[str], NodeStore]) -> Path | None:
        """Kill all that runs on a node of the job, and delete what it keeps in memory.

        Args:
            node: number.
            memory: of a node, by its name.

        Returns:
            Where its memory was; None: nothing runs there.
        """

    def close(self) -> None:
        """Let nothing run any more; all workers are dead."""
