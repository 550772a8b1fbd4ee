# SPDX-License-Identifier: Apache-2.0
"""Makes a dense checkpoint from a window in this process, without the ranks that captured it."""

import logging
import os
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.moevement.seams import cpu_device, starting
from moevement_ext.errors import UserError
from moevement_ext.memory.node_store import STUB
from moevement_ext.memory.shelf import Copy, copy_at_twin, copy_in_file, read_any
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.memory.window.twin import base_path

from ..lab.errors import LabError
from .export import one_run, saved_in
from .found import Found, by_window, missing


def newest(found: Sequence[Found], directory: Path) -> list[Found]:
    """Committed files, copies included, of the newest window that all ranks of a run have.

    Only a window of one slot holds a complete state of one iteration; a longer window needs a
    replay, for which the run must be launched.

    Raises:
        LabError: there are several runs, or no window of all ranks, or it needs a replay.
    """
    one_run(found, directory)
    ordered = by_window(found)
    if not ordered:
        raise LabError(f'{directory}: {_problems(found) or "there is no window"}')
    whole = next((files for files in ordered if not _missing_of(files)), None)
    if whole is None:
        absent = ', '.join(map(str, _missing_of(ordered[0])))
        raise LabError(
            f'{directory}: of window {ordered[0][0].window} there is none of the ranks {absent}'
            f'{_problems(found, "; ")}. Bring what other nodes hold into this directory.'
        )
    first = whole[0]
    if first.slots != 1:
        raise LabError(
            f'window {first.window} has {first.slots} slots, which only a replay puts together: '
            'export without --offline, and give after -- the command that launched the run'
        )
    return whole


def export_offline(window: Sequence[Found], output: Path, flags: Sequence[str]) -> int:
    """Save a window in `output`; returns the iteration of the checkpoint. Once in a process.

    Raises LabError: flags or windows do not allow it; the message names the cause.
    """
    if saved_in(output) is not None:
        raise LabError(f'--output {output}: there is a checkpoint already; name another one')
    try:
        _use_a_cpu()
        from megatron.moevement.offline.exporter import export
        from megatron.moevement.offline.filling import DenseSlot

        copies = Copies(window)
        placed = {owner: header.placed for owner, header in copies.headers.items()}
        known = {owner: one for owner, one in placed.items() if one is not None}
        logging.disable(logging.WARNING)  # about functions that this process does not use
        with warnings.catch_warnings(action='ignore'):
            return export(DenseSlot(copies.headers, known, copies.read), flags, output)
    except (RefusedWindow, UserError) as error:
        raise LabError(str(error)) from error
    finally:
        logging.disable(logging.NOTSET)


def _use_a_cpu() -> None:
    """Prepare the first import of Megatron; GPUs are left alone."""
    os.environ['CUDA_VISIBLE_DEVICES'] = ''
    starting.check_installation()
    cpu_device.install()
    with warnings.catch_warnings(action='ignore'):
        from megatron.moevement.offline import exporter  # noqa: F401
        from megatron.moevement.seams import datasets

    datasets.use_compiled()
    cpu_device.patch_upstream()


def _missing_of(files: Sequence[Found]) -> list[int]:
    if files[0].layout is None:
        raise LabError(
            f'{files[0].path}: it does not record its layout: export '
            'without --offline, and give after -- the command that launched the run'
        )
    return missing(files)


def _problems(found: Sequence[Found], before: str = '') -> str:
    """Problems of committed files, in one line."""
    problems = [f'{one.path}: {one.problem}' for one in found if one.problem is not None]
    return before + '; '.join(problems) if problems else ''


# ---- copies of one window


class Copies:
    """The committed files of one window of one slot, of any owner and holder. One thread.

    Attributes:
        headers: headers of the slot, by owner.

    Raises:
        RefusedWindow: no file of an owner can be read.
    """

    def __init__(self, found: Iterable[Found]) -> None:
        files: dict[int, list[Path]] = defaultdict(list)
        for one in found:
            files[one.rank].append(one.path)
        self._copies = {owner: _opened(paths) for owner, paths in files.items()}
        self.headers = {owner: copies[0].headers[0] for owner, copies in self._copies.items()}

    def read(self, owner: int, index: int) -> memoryview:
        """Bytes of a record, compared with their checksum; RefusedWindow if no copy is right."""
        return read_any(self._copies[owner], 0, index)


def _opened(paths: Iterable[Path]) -> list[Copy]:
    copies, refusals = [], []
    for path in paths:
        try:
            copies.append(_opened_one(path))
        except RefusedWindow as refusal:
            refusals.append(str(refusal))
    if not copies:
        raise RefusedWindow('; '.join(refusals))
    # A copy of other bytes has the same name: it must not stand in for a damaged record.
    records = [[header.records for header in copy.headers] for copy in copies]
    return [copy for copy, own in zip(copies, records, strict=True) if own == records[0]]


def _opened_one(path: Path) -> Copy:
    if not path.parent.name.startswith(STUB):
        return copy_in_file(path)
    if not base_path(path).exists():
        raise RefusedWindow(f'{path}: the window that it belongs to is not there')
    return copy_at_twin(path)
