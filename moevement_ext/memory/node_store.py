# SPDX-License-Identifier: Apache-2.0
"""The directory of one run on one node: `<root>/<run id>/<node>/<holder>/<owner>/`.

A holder is a rank of this node; it keeps windows of its own and replicas for other owners (see
`window.file_names` and `window.generations`).
"""

import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from moevement_ext.config import ConfigurationError
from moevement_ext.errors import HostMemoryError
from moevement_ext.memory import private
from moevement_ext.memory.holder_lock import HolderLock, StoreInUseError, taken
from moevement_ext.memory.window.file_names import committed_in
from moevement_ext.memory.window.name import StoredWindow

logger = logging.getLogger(__name__)

_PATH_PART = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,200}')
# Begins the name of a holder's directory that is being deleted.
_FORMER = 'former-'


class NodeStore:
    """The directory of one run on one node; safe to construct in every rank of the node.

    Args:
        root: directory in a tmpfs, e.g. `/dev/shm/moevement-1000`.
        run_id: `--sparse-ckpt-run-id`.
        node: name of this node (or of this emulated node).

    Raises:
        ValueError: the run id or the node name cannot be a directory name.
    """

    def __init__(self, root: Path, run_id: str, node: str) -> None:
        require_directory_name('--sparse-ckpt-run-id', run_id)
        require_directory_name('node name', node)
        self.root = Path(root)
        self.run_id = run_id
        self.path = self.root / run_id / node
        self._locks: dict[int, HolderLock] = {}

    def holder_path(self, holder: int) -> Path:
        """Directory of everything rank `holder` keeps."""
        return self.path / str(holder)

    @property
    def shared(self) -> Path:
        """Directory of what belongs to no rank, and can be had again."""
        return self.path / 'shared'

    def ledger_path(self, holder: int) -> Path:
        """Path of the ledger of rank `holder`."""
        return self.holder_path(holder) / 'ledger'

    def lock(self, holder: int) -> None:
        """Claim the directory of `holder` for this object, until `close` or the process ends.

        A process of an earlier life that is still there is waited for.

        Raises:
            StoreInUseError: another live job uses the same run id on this node.
            ForeignFileError: a directory on the way is not this user's own.
        """
        if holder not in self._locks:
            path = self.holder_path(holder)
            private.make_directories(self.root, path)
            self._locks[holder] = taken(path / 'lock')

    def scan(self) -> list[StoredWindow]:
        """List all committed windows on this node, of whichever holder, newest first.

        Only names are read and nothing stays mapped; what a file holds is verified when loaded.
        There are none in directories that are not this user's own.
        """
        try:
            private.check_directories(self.root, self.path)
        except FileNotFoundError:
            return []
        except (HostMemoryError, OSError) as error:
            logger.warning('windows of earlier processes are not used: %s', error)
            return []
        found = [
            window
            for holder, holder_path in _numbered(self.path)
            for owner, owner_path in _numbered(holder_path)
            for window in committed_in(owner_path, holder, owner)
        ]
        return sorted(found, key=lambda window: (-window.name.start, window.owner, window.holder))

    def close(self) -> None:
        """Release the locks; files stay for the next process."""
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()

    def remove_rank(self, holder: int) -> None:
        """Delete everything `holder` keeps, for a clean exit, and the run if it is empty then.

        Nothing happens if this object has not locked it: it is somebody else's.
        """
        lock = self._locks.pop(holder, None)
        if lock is None:
            return
        shutil.rmtree(self.holder_path(holder), ignore_errors=True)
        lock.release()
        self._remove_empty()

    def remove_owners_but(self, kept: Collection[int], holder: int) -> None:
        """Delete what `holder`, locked by this object, keeps for other owners than these."""
        for owner, path in _numbered(self.holder_path(holder)):
            if owner not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def remove_holders_but(self, kept: Collection[int]) -> None:
        """Delete what other holders than these have left here; of none that has a live process.

        A process that begins meanwhile is locked out for no longer than a rename takes.
        """
        for holder, path in _numbered(self.path):
            if holder in kept:
                continue
            with suppress(OSError, StoreInUseError, HostMemoryError):
                lock = HolderLock(path / 'lock')
                try:
                    path.rename(path.with_name(f'{_FORMER}{holder}-{os.getpid()}'))
                finally:
                    lock.release()
        for path in self.path.glob(f'{_FORMER}*'):
            shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """Delete everything of this run on this node, other ranks' files included."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()
        self._remove_empty()

    def _remove_empty(self) -> None:
        shutil.rmtree(self.shared, ignore_errors=True)
        for path in (self.path, self.path.parent):
            try:
                path.rmdir()
            except FileNotFoundError:
                continue  # another rank was faster
            except OSError:
                return  # not empty: others are still there


def require_directory_name(flag: str, part: str) -> None:
    """Refuse what cannot be the name of a directory.

    Raises:
        ConfigurationError: it cannot; the message names the flag.
    """
    if not _PATH_PART.fullmatch(part):
        raise ConfigurationError(
            f'{flag} {part!r} is used as a directory name: it must begin with a letter '
            f'or digit and have only letters, digits, ".", "_" and "-"'
        )


def _numbered(path: Path) -> Iterator[tuple[int, Path]]:
    """Yield the subdirectories named by a rank; none if `path` is gone or not readable."""
    try:
        entries = sorted(path.iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.name.isdecimal() and entry.is_dir():
            yield int(entry.name), entry
