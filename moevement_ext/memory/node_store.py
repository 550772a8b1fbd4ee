# SPDX-License-Identifier: Apache-2.0
"""The directory of one run on one node: `<root>/<run id>/<node>/<holder>/<owner>/`.

A holder is a rank of this node; it keeps its own windows and replicas for other owners (see
`window.name` and `window.generations`). For owners that capture the same state it keeps
stubs, in `stub-<owner>/` (see `window.twin`).
"""

import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from moevement_ext.config import ConfigurationError
from moevement_ext.errors import HostMemoryError
from moevement_ext.logger import logger_of
from moevement_ext.memory import private_file
from moevement_ext.memory.holder_lock import HolderLock, StoreInUseError, is_held, taken
from moevement_ext.memory.window.name import COMMITTED, StoredWindow, committed_in, names_in
from moevement_ext.memory.window.refusal import UnreadableWindow

logger = logger_of(__name__)

_PATH_PART = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,200}')
# Prefix of the directory with the stubs of an owner.
STUB = 'stub-'
# Directory of pages reserved for ranks that may join.
RESERVED = 'reserved'
# Prefix of a holder's directory that is being deleted.
FORMER = 'former-'

DEATHS = 'deaths.jsonl'
"""Name of the file in `NodeStore.shared`."""


class NodeStore:
    """The directory of one run on one node. Every rank of the node may construct this.

    `root` is in a tmpfs, e.g. `/dev/shm/moevement-1000`. A run id or node name that cannot be a
    directory name raises `ValueError`.
    """

    def __init__(self, root: Path, run_id: str, node: str) -> None:
        require_directory_name('--sparse-ckpt-run-id', run_id)
        require_directory_name('node name', node)
        self.root = Path(root)
        self.run_id = run_id
        self.path = self.root / run_id / node
        self._locks: dict[int, HolderLock] = {}

    def holder_path(self, holder: int) -> Path:
        return self.path / str(holder)

    def owner_path(self, holder: int, owner: int) -> Path:
        return self.holder_path(holder) / str(owner)

    def stub_path(self, holder: int, owner: int) -> Path:
        """Directory of the stubs that rank `holder` keeps as a twin of `owner`."""
        return self.holder_path(holder) / f'{STUB}{owner}'

    @property
    def shared(self) -> Path:
        """Directory of files that belong to no rank and can be recreated."""
        return self.path / 'shared'

    @property
    def reserved(self) -> Path:
        """Directory of files for ranks that may join this node (see `reservation`)."""
        return self.path / RESERVED

    def ledger_path(self, holder: int) -> Path:
        return self.holder_path(holder) / 'ledger'

    def lock(self, holder: int) -> None:
        """Lock the directory of `holder` for this object, until `close` or the end of the process.

        Waits for an earlier process of the rank that is still ending. Raises `StoreInUseError` if
        another live job has the run id on this node, or `ForeignFileError`.
        """
        if holder not in self._locks:
            path = self.holder_path(holder)
            private_file.make_directories(self.root, path)
            self._locks[holder] = taken(path / 'lock')

    def wait_for_predecessor(self, holder: int) -> None:
        """Wait for an earlier process of `holder` that is still ending; errors as `lock`."""
        path = self.holder_path(holder) / 'lock'
        if path.exists():
            taken(path).release()

    def scan(self) -> list[StoredWindow]:
        """List the committed windows of all holders on this node by file name, newest first.

        Skips directories that are not this user's. Raises `UnreadableWindow` if one cannot be
        listed now.
        """
        return self._scan('')

    def scan_stubs(self) -> list[StoredWindow]:
        """List the committed stubs, as `scan`. A stub is useless without its base."""
        return self._scan(STUB)

    def _scan(self, kind: str) -> list[StoredWindow]:
        try:
            private_file.check_directories(self.root, self.path)
        except FileNotFoundError:
            return []
        except HostMemoryError as error:
            logger.warning('windows of earlier processes are not used: %s', error)
            return []
        except OSError as error:
            raise UnreadableWindow(f'cannot be listed: {error.strerror}', self.path) from error
        found = [
            window
            for holder, holder_path in _numbered(self.path)
            for owner, owner_path in _numbered(holder_path, kind)
            for window in committed_in(owner_path, holder, owner)
        ]
        return sorted(found, key=lambda window: (-window.name.start, window.owner, window.holder))

    def close(self) -> None:
        """Release the locks; files stay for the next process."""
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()

    def remove_rank(self, holder: int) -> None:
        """Delete all files of `holder`, if locked by this object, and the run's empty directory."""
        lock = self._locks.pop(holder, None)
        if lock is None:
            return
        shutil.rmtree(self.holder_path(holder), ignore_errors=True)
        lock.release()
        self._remove_empty()

    def remove_owners_but(
        self, kept: Collection[int], holder: int, stubs: Collection[int] = ()
    ) -> None:
        """Delete files of `holder`, locked by this object, for owners not in `kept` or `stubs`."""
        for kind, owners in (('', kept), (STUB, stubs)):
            with suppress(UnreadableWindow):
                for owner, path in _numbered(self.holder_path(holder), kind):
                    if owner not in owners:
                        shutil.rmtree(path, ignore_errors=True)

    def remove_holders_but(self, kept: Collection[int]) -> None:
        """Delete the files of holders that are not in `kept` and have no live process.

        A process that starts meanwhile is locked out only for the duration of a rename.
        """
        with suppress(UnreadableWindow):
            for holder, path in _numbered(self.path):
                if holder in kept:
                    continue
                with suppress(OSError, StoreInUseError, HostMemoryError):
                    lock = HolderLock(path / 'lock')
                    try:
                        path.rename(path.with_name(f'{FORMER}{holder}-{os.getpid()}'))
                    finally:
                        lock.release()
        for path in self.path.glob(f'{FORMER}*'):
            shutil.rmtree(path, ignore_errors=True)

    def remove_unused(self) -> None:
        self.remove_holders_but(())
        self._remove_empty()

    def remove(self) -> None:
        """Delete everything of this run on this node, other ranks' files included."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()
        self._remove_empty()

    def _remove_empty(self) -> None:
        try:
            if any(_numbered(self.path)):  # a later rank of the node needs the secret
                return
        except UnreadableWindow:
            return
        shutil.rmtree(self.shared, ignore_errors=True)
        shutil.rmtree(self.reserved, ignore_errors=True)
        for path in (self.path, self.path.parent):
            try:
                path.rmdir()
            except FileNotFoundError:
                continue  # another rank was faster
            except OSError:
                return  # not empty: other ranks still have files


def holds_windows(run: Path) -> bool:
    """True if `<root>/<run id>` has a committed window, of any node, holder and owner."""
    return any(run.glob(f'*/*/*/{COMMITTED}'))


def is_in_use(run: Path) -> bool:
    """True if a live process, perhaps of another job, keeps windows in `<root>/<run id>`."""
    return any(map(is_held, run.glob('*/*/lock')))


def require_directory_name(flag: str, part: str) -> None:
    """Refuse a value of `flag` that cannot name a directory, with a `ConfigurationError`."""
    if not _PATH_PART.fullmatch(part):
        raise ConfigurationError(
            f'{flag} {part!r} is used as a directory name: it must begin with a letter '
            f'or digit and have only letters, digits, ".", "_" and "-"'
        )


def _numbered(path: Path, kind: str = '') -> Iterator[tuple[int, Path]]:
    """Yield the entries named `kind` and a rank; errors as of `names_in`."""
    for name in names_in(path):
        number = name.removeprefix(kind)
        if name == kind + number and number.isdecimal():
            yield int(number), path / name


class Death(msgspec.Struct, frozen=True, order=True):
    """The death of a process; sorts by time."""

    time: float
    """Seconds since the epoch."""
    rank: int
    pid: int


_DEATH = msgspec.json.Decoder(Death)


def noted_deaths(shared: Path) -> list[Death]:
    """The last recorded death of each rank on this node; damaged lines are skipped."""
    newest: dict[int, Death] = {}
    with suppress(OSError):
        for line in (shared / DEATHS).read_bytes().splitlines():
            with suppress(msgspec.DecodeError):
                death = _DEATH.decode(line)
                newest[death.rank] = death
    return list(newest.values())


def forget_deaths(shared: Path) -> None:
    """Delete the recorded deaths, at the start of a job."""
    with suppress(OSError):
        (shared / DEATHS).unlink(missing_ok=True)
