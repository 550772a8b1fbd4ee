# SPDX-License-Identifier: Apache-2.0
"""Staged failures: when each is due, and the host memory that is deleted with a node."""

import re
from pathlib import Path

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.config_file import value_of
from moevement_ext.errors import LaunchError
from moevement_ext.launch.launch_config import LaunchConfig, StagedAction, StagedFault
from moevement_ext.memory.node_store import NodeStore

_ITERATION = re.compile(r'\biteration +(\d+)/')


class StagedFaults:
    """Pending staged failures. `ConfigurationError`: bad flags of the program's host memory."""

    def __init__(self, config: LaunchConfig) -> None:
        self.pending = list(config.faults)
        self._run: tuple[Path, str] | None = None
        for fault in config.faults:
            if fault.action in (StagedAction.KILL_NODE, StagedAction.LOSE_NODE):
                self._run = _run_in_memory(config, fault)

    def due(self, iteration: int) -> list[StagedFault]:
        """Return the failures due once the last rank has logged `iteration`, each failure once."""
        found = [fault for fault in self.pending if fault.iteration <= iteration]
        self.pending = [fault for fault in self.pending if fault not in found]
        return found

    def memory_of(self, reported: Path | None, name: str) -> NodeStore:
        """Host memory of a node; `reported`: the directory of the run that the workers reported.

        Raises `LaunchError` if neither they nor the program's flags name one.
        """
        run = self._run or (reported and (reported.parent, reported.name))
        if not run:
            raise LaunchError(
                'a staged loss of a node deletes its memory, but the program has reported none.'
            )
        return NodeStore(*run, name)


def logged_iteration(line: str) -> int | None:
    logged = _ITERATION.search(line)
    return None if logged is None else int(logged[1])


def _run_in_memory(config: LaunchConfig, fault: StagedFault) -> tuple[Path, str] | None:
    """Directory and name of the run, with all its layouts; None if the flags do not name it."""
    run_id = value_of(config.flags, '--sparse-ckpt-run-id')
    if run_id is None:
        return None
    root = value_of(config.flags, '--sparse-ckpt-dir') or SparseCheckpointConfig.dir
    settings = SparseCheckpointConfig(dir=root, run_id=run_id)
    checked = NodeStore(Path(settings.dir), run_id, f'node{fault.target}')
    return checked.root, checked.run_id
