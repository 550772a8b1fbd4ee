# SPDX-License-Identifier: Apache-2.0
"""Reports windows of other runs on this node, in case one of them was meant to be resumed.

Without `--sparse-ckpt-run-id` a mistyped flag makes another run, which finds no windows and would
silently train from the start. So would a run whose node has another name than before.
"""

from collections.abc import Collection
from contextlib import suppress
from functools import partial

from moevement_ext.errors import SparseCheckpointError, UserError
from moevement_ext.logger import logger_of
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.holder_lock import is_held
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.expected import Expected
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.listing import names_in, patiently
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.memory.window.placed import of_same_training
from moevement_ext.memory.window.refused import UnreadableWindow
from moevement_ext.memory.window.settings import told

logger = logger_of(__name__)

# Maximum number of differences: a run with more is another job, not a mistake.
_MOST = 4
_RUN_ID = '--sparse-ckpt-run-id'


def say(store: NodeStore, rank: Rank) -> None:
    """Name other runs with windows on rank 0's node that differ in few settings, by these.

    Collective, when the run has no windows. `UserError` with `--sparse-ckpt-strict` if one differs
    in its id alone, as jobs of a chain with Slurm's ids do; it may live on other nodes.
    """
    alone = ''
    looks = rank.number == 0 and rank.config.run_id is None
    with suppress(OSError):
        for run_id in sorted(path.name for path in store.root.iterdir()) if looks else ():
            with suppress(SparseCheckpointError, OSError):  # no run, or nothing of ours
                if run_id != store.run_id:
                    alone = _told(NodeStore(store.root, run_id, store.path.name), rank) or alone
    said = rank.exchange('other-runs', alone.encode())[0].decode()
    if said and rank.config.strict:
        raise UserError(f'--sparse-ckpt-strict: {said} To start over give it its own {_RUN_ID}.')


def of_other_names(
    store: NodeStore, identity: RankIdentity, layouts: Collection[str] = ()
) -> dict[str, int]:
    """Newest start of a window of this run here, by an earlier name of this machine.

    Excludes emulated nodes with live processes. `layouts` are directories of other layouts, of
    which windows of the same training count. Raises `UnreadableWindow` if that is unknown now.
    """
    found = dict[str, int]()
    for run in {store.run_id, *layouts}:
        for name in names_in(store.root / run):
            if name != store.path.name:
                try:
                    other = NodeStore(store.root, run, name)
                    newest = patiently(partial(_newest, other, store, identity))
                except UnreadableWindow:
                    raise
                except SparseCheckpointError:
                    continue
                found[name] = max(newest, found.get(name, newest))
    return {name: start for name, start in found.items() if start >= 0}


def _newest(other: NodeStore, store: NodeStore, identity: RankIdentity) -> int:
    windows = other.scan()
    if not windows or any(is_held(other.holder_path(found.holder) / 'lock') for found in windows):
        return -1
    newest = windows[0]
    file = WindowFile.open(newest.path)
    if other.run_id == store.run_id:
        file.verify_identity(Expected.of(identity, newest.name)._replace(owner=newest.owner))
    elif not of_same_training(file.header(0).placed, identity.placed):
        return -1
    return newest.name.start


def _told(other: NodeStore, rank: Rank) -> str:
    """Name `other` in the log if it may be meant; returns the text if its id alone differs."""
    windows = other.scan()
    if not windows or is_held(other.holder_path(windows[0].holder) / 'lock'):
        return ''
    header = WindowFile.open(windows[0].path).header(0)
    lines = Expected.of(rank.identity).differs(header).decisive
    differing = [line for line in lines if not line.startswith(f'{_RUN_ID}:')]
    if not header.settings or len(differing) > _MOST:
        return ''
    said = (
        f'nothing is found of the run {rank.run_id}; windows of {other.run_id}, from iteration '
        f'{header.start} on, are not used, as it differs in {told(differing) or "its id alone"}. '
        'To go on from them launch as that was'
        f'{"" if differing else f", with {_RUN_ID} {other.run_id}"}.'
    )
    logger.warning('%s', said)
    return '' if differing else said
