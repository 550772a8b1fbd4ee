# SPDX-License-Identifier: Apache-2.0
"""Reports windows of other runs on this node, in case one of them was meant to be resumed.

Without `--sparse-ckpt-run-id` the run id follows from the flags. A mistyped flag makes another run,
which finds no windows and would train from the start without a message.
"""

import logging
import re
from pathlib import Path

from moevement_ext.errors import SparseCheckpointError
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.expected import Expected
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.settings import told

logger = logging.getLogger(__name__)

# Maximum number of differences: a run with more is another job, not a mistake.
_MOST = 4
_RUN_ID = '--sparse-ckpt-run-id'


def say(store: NodeStore, rank: Rank) -> None:
    """Name other runs with windows on this node that differ in few settings, and the differences.

    Called by one rank, when its own run has no windows.
    """
    if rank.config.run_id is not None:
        return
    try:
        others = sorted(path.name for path in store.root.iterdir() if path.name != store.run_id)
    except OSError:
        return
    for run_id in others:
        try:
            _look_at(NodeStore(store.root, run_id, store.path.name), rank)
        except (SparseCheckpointError, OSError):  # no run, or nothing of ours
            continue


def _look_at(other: NodeStore, rank: Rank) -> None:
    windows = other.scan()
    if not windows or _lives(other.holder_path(windows[0].holder)):
        return
    header = WindowFile.open(windows[0].path).header(0)
    lines = Expected.of(rank.identity).differs(header).decisive
    differing = [line for line in lines if not line.startswith(f'{_RUN_ID}:')]
    if header.settings and len(differing) <= _MOST:
        logger.warning(
            'sparse checkpointing: nothing is found of the run %s; windows of %s, from iteration '
            '%d on, are not used, as it differs in %s. To go on from them launch as that was%s.',
            rank.run_id,
            other.run_id,
            header.start,
            told(differing) or 'its id alone',
            '' if differing else f', with {_RUN_ID} {other.run_id}',
        )


def _lives(holder: Path) -> bool:
    """Return True if a process of this node uses the directory; trying its lock would take it."""
    said = re.match(r'\d+', (holder / 'lock').read_text())
    return said is not None and Path(f'/proc/{said[0]}').exists()
