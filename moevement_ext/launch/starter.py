# SPDX-License-Identifier: Apache-2.0
"""Interface for starting workers, on this machine or through agents on other nodes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from moevement_ext.launch.remote import RemoteChild
from moevement_ext.memory.node_store import NodeStore


class Starter(Protocol):
    """Starts workers for the supervisor; only the supervisor's thread uses it.

    Attributes:
        moves_ranks: ranks of a lost node may move to another node.
    """

    moves_ranks: bool

    def open(self, port: int) -> None:
        """Prepare for workers that use the store at `port`; called again for a new store."""

    def start(
        self, rank: int, restarts: int, heard: Callable[[int], None] | None = None
    ) -> RemoteChild:
        """Start or restart a rank; the process is reported once it exists.

        `heard` is called with the iterations that the worker logs, if it has no log file.
        """

    def keep_spares(self) -> None:
        """Start hot spares; called once all workers run, as spares are not urgent."""

    def reserve(self, memory: Path, files: Sequence[Sequence[int]]) -> None:
        """Reserve host memory for ranks that may move to another node.

        `memory` is the directory of the run on each node, `files` the sizes of each rank's
        files.
        """

    def spares_left(self) -> str:
        """Describe the remaining spares."""

    def look(self) -> None:
        """Do periodic work, ten times a second; `LaunchError` if a worker cannot be started."""

    def lose_node(self, node: int, memory: Callable[[str], NodeStore]) -> Path | None:
        """Kill all processes on a node of the job, and delete its host memory.

        `memory` returns the host memory of a node by its name. Returns the deleted
        directory; None if the node runs nothing.
        """

    def close(self) -> None:
        """End all other processes; called once all workers are dead."""
