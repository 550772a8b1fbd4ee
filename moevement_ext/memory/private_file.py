# SPDX-License-Identifier: Apache-2.0
"""Directories and files of this user alone, in a tmpfs that all users may write to.

Another user of the node can predict the names of a run and create them first: a link, or a file
that this user can read and change later. So every directory level is checked before anything below
it is used, no link is followed, and foreign files are refused by name.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moevement_ext.errors import HostMemoryError

_REMEDY = (
    'Another user, or another program, made it: choose another {flag} (or --sparse-ckpt-run-id), '
    'or remove it.'
)
_OWN = 'choose a {flag} of your own, for example a directory that you make in it.'


class ForeignFileError(HostMemoryError):
    """A path is not this user's alone; it was not used. Costs protection, not the training.

    Attributes:
        fault: what is wrong with the path.
        problem: the path and its fault, without the remedy.
    """

    def __init__(self, path: Path | str, fault: str, remedy: str = f'. {_REMEDY}') -> None:
        self.fault, self.problem, self._remedy = fault, f'{path} {fault}', remedy
        super().__init__(self.about('--sparse-ckpt-dir'))

    def about(self, flag: str) -> str:
        """The message, about a directory that this flag has named."""
        return self.problem + self._remedy.format(flag=flag)


def make_directories(root: Path, path: Path) -> None:
    """Create the missing levels from `root` down to `path`, for this user only.

    Raises `ForeignFileError` if an existing level is not this user's own directory; for `root`
    itself it suffices that other users cannot replace its entries.
    """
    try:
        root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(root, 0o700)
        check_root(root)
        for level in _levels(root, path):
            with suppress(FileExistsError):
                os.mkdir(level, 0o700)
            _check_directory(level)
    except PermissionError as error:
        raise ForeignFileError(error.filename, f'cannot be used: {error.strerror}') from error


def check_directories(root: Path, path: Path) -> None:
    """Check as `make_directories`, before files there are read; `OSError` if a level is missing."""
    check_root(root)
    for level in _levels(root, path):
        _check_directory(level)


def open_file(path: Path, flags: int) -> int:
    """Open a regular file of this user with mode 0600; new files get this mode.

    `flags` and errors as for `os.open`, without `O_TRUNC`: nothing changes before the check. The
    caller closes the descriptor. Raises `ForeignFileError` for a link, no regular file, another
    user's file, or one open to other users.
    """
    try:
        # Without O_NONBLOCK a named pipe would block.
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ForeignFileError(path, 'is a symbolic link') from error
    try:
        _check_file(path, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor as of `open_file`, closed at the end."""
    fd = open_file(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def _levels(root: Path, path: Path) -> list[Path]:
    parts = path.relative_to(root).parts
    return [root.joinpath(*parts[: depth + 1]) for depth in range(len(parts))]


def check_root(root: Path) -> None:
    """Raise `ForeignFileError` unless `root` can hold files of this user alone."""
    link = os.lstat(root)
    status = os.stat(root)
    for owner in (link.st_uid, status.st_uid):
        if owner not in (0, os.geteuid()):
            raise ForeignFileError(root, f'belongs to user {owner}', f': {_OWN}')
    if not stat.S_ISDIR(status.st_mode):
        raise ForeignFileError(root, 'is not a directory')
    # A group may write: it can rename what lies here, which must be this user's to be used.
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise ForeignFileError(
            root,
            f'can be written by other users (mode {stat.filemode(status.st_mode)}), who could '
            'replace what lies in it',
            f': chmod o-w, or {_OWN}',
        )


def require_modes(made: os.stat_result) -> None:
    """Raise `ForeignFileError` unless the file `made` with mode 0600 is this user's alone."""
    if made.st_uid == os.geteuid() and not made.st_mode & 0o077:
        return
    raise ForeignFileError(
        'its file system',
        f'gives a new file mode {stat.filemode(made.st_mode)} and user {made.st_uid}, not '
        f'-rw------- and user {os.geteuid()}',
        ': mount it with this user, file mode 0600 and directory mode 0700 (CIFS: uid=, '
        'file_mode=, dir_mode=; gcsfuse: --uid, --file-mode, --dir-mode), train as a user that is '
        'not squashed (NFS: root), or choose another {flag}.',
    )


def _check_directory(path: Path) -> None:
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise ForeignFileError(path, 'is not a directory')
    if status.st_uid != os.geteuid():
        raise ForeignFileError(path, f'belongs to user {status.st_uid}')
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ForeignFileError(path, 'can be written by other users')
    if status.st_mode & 0o077:
        os.chmod(path, 0o700)  # no other user could write there before


def _check_file(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ForeignFileError(path, 'is not a regular file')
    if status.st_uid != os.geteuid():
        raise ForeignFileError(path, f'belongs to user {status.st_uid}')
    if status.st_mode & 0o077:
        mode = stat.filemode(status.st_mode)
        raise ForeignFileError(path, f'is open to other users (mode {mode})')
    if status.st_nlink != 1:
        raise ForeignFileError(path, 'has a second name (a hard link)')
