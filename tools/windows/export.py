# SPDX-License-Identifier: Apache-2.0
"""Makes a dense checkpoint from the newest window of a run that has ended.

Windows of several iterations are only combined by a replay: the run's own program is launched with
its own flags, converts the window, trains one iteration, and ends with upstream's save. It ends
after its first iteration, not after a given one: it may find the newest window damaged, or a newer
window that this node does not see. A window of one iteration is a complete state: this process can
make the checkpoint, without the ranks that captured it.
"""

import logging
import os
import subprocess
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from moevement_ext.config import EXPORT, OFF
from moevement_ext.config_file import last_value, value_of
from moevement_ext.errors import UserError
from moevement_ext.memory.node_store import STUB
from moevement_ext.memory.shelf import Copy, base_of, copy_in_file, copy_in_memory, read_any
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.memory.window.twin import base_path

from ..lab.programs import LabError
from .found import DISK, Found, by_window, complete, missing
from .pruning import live_runs

TORCH_DIST = 'torch_dist'
_TRACKER = 'latest_checkpointed_iteration.txt'


def export(
    found: Sequence[Found], directory: Path, output: Path, after: Sequence[str], offline: bool
) -> tuple[str, int]:
    """Save a checkpoint in `output`; returns the run, and the iteration of the checkpoint.

    Args:
        found: all windows below `directory`, of one run.
        directory: as the user gave it.
        output: folder for the checkpoint, which has none yet.
        after: command that launches the run, or with `offline` flags of its program.
        offline: make it in this process, once.

    Raises LabError: windows or flags do not allow it, or the launched run did not save.
    """
    runs = sorted({one.run for one in found})
    if len(runs) != 1:
        names = ', '.join(runs) or 'none'
        raise LabError(f'{directory}: name the directory of one run; there is {names}')
    if live_runs(found):
        raise LabError(f'{runs[0]}: a process lives; end the job first, or let it save by itself')
    if _saved_in(output) is not None:
        raise LabError(f'--output {output}: there is a checkpoint already; name another one')
    if offline:
        return runs[0], _save_here(whole_window(found, directory), output, after)
    windows = complete(found)[runs[0]]
    if not windows:
        raise LabError(f'{directory}: no window is whole on all ranks that are seen there')
    newest = next(one for one in found if one.window == windows[0] and one.sound)
    return runs[0], _launch(newest, output, after)


def _saved_in(directory: Path) -> int | None:
    """Iteration of the newest checkpoint in `directory`; None without one."""
    tracker = directory / _TRACKER
    text = tracker.read_text(errors='replace').strip() if tracker.is_file() else ''
    return int(text) if text.isdecimal() else None


# ---- by a last launch of the run


def _launch(newest: Found, output: Path, command: Sequence[str]) -> int:
    load = last_value(command, '--load')
    dense = None if load is None else _saved_in(Path(load))
    assert newest.slots is not None
    if dense is not None and dense >= newest.start + newest.slots - 1:
        raise LabError(
            f'--load {load} has iteration {dense}, and the windows none after it: use that'
        )
    launched = [*command, *launch_flags(newest, output, command)]
    done = subprocess.run(launched, check=False, env={**os.environ, EXPORT: newest.tier})
    saved = _saved_in(output)
    if done.returncode != 0 or saved is None:
        raise LabError(
            f'the run ended with status {done.returncode} and saved no checkpoint in {output}; '
            'its output says why'
        )
    return saved


def launch_flags(newest: Found, output: Path, command: Sequence[str]) -> list[str]:
    """Flags that `command` gets besides; the last value of a flag counts."""
    flag = '--sparse-ckpt-disk' if newest.tier == DISK else '--sparse-ckpt-dir'
    elastic = (value_of(command, '--sparse-ckpt-elastic') or OFF) != OFF
    # An elastic run finds the directory of its layout by itself.
    run = base_of(newest.run) if elastic else newest.run
    flags = [flag, str(newest.root), '--sparse-ckpt-run-id', run]
    flags += ['--save', str(output.absolute()), '--ckpt-format', TORCH_DIST]
    flags += ['--save-interval', '1', '--exit-interval', '1']
    if '--use-distributed-optimizer' in command:  # for other layouts to load its state
        flags.append('--dist-ckpt-optim-fully-reshardable')
    return flags


# ---- in this process


def whole_window(found: Sequence[Found], directory: Path) -> list[Found]:
    """Committed files, copies included, of the newest window that all ranks of the run have.

    Raises LabError: there is none, or it needs a replay.
    """
    problems = '; '.join(f'{one.path}: {one.problem}' for one in found if one.problem is not None)
    ordered = by_window(found)
    if not ordered:
        raise LabError(f'{directory}: {problems or "there is no window"}')
    replayed = 'export without --offline, and give after -- the command that launched the run'
    for files in ordered:
        first = files[0]
        if first.layout is None:
            raise LabError(f'{first.path}: it does not record its layout: {replayed}')
        if missing(files):
            continue
        if first.slots != 1:
            raise LabError(
                f'window {first.window} has {first.slots} slots, which only a replay puts '
                f'together: {replayed}'
            )
        return files
    absent = ', '.join(map(str, missing(ordered[0])))
    raise LabError(
        f'{directory}: of window {ordered[0][0].window} there is none of the ranks {absent}'
        f'{problems and "; " + problems}. Bring what other nodes hold into this directory.'
    )


def _save_here(window: Sequence[Found], output: Path, flags: Sequence[str]) -> int:
    # The first import of Megatron is prepared; GPUs are left alone.
    from megatron.moevement.seams import cpu_device, starting

    os.environ['CUDA_VISIBLE_DEVICES'] = ''
    try:
        starting.check_installation()
        cpu_device.install()
        with warnings.catch_warnings(action='ignore'):
            from megatron.moevement.offline.exporter import export
            from megatron.moevement.offline.filling import DenseSlot
            from megatron.moevement.seams import datasets

        datasets.use_compiled()
        cpu_device.patch_upstream()
        copies = copies_of(window)
        headers = {owner: own[0].headers[0] for owner, own in copies.items()}
        placed = {owner: head.placed for owner, head in headers.items() if head.placed is not None}

        def read(owner: int, index: int) -> memoryview:
            return read_any(copies[owner], 0, index)

        logging.disable(logging.WARNING)  # about functions that this process does not use
        with warnings.catch_warnings(action='ignore'):
            return export(DenseSlot(headers, placed, read), flags, output)
    except (RefusedWindow, UserError) as error:
        raise LabError(str(error)) from error
    finally:
        logging.disable(logging.NOTSET)


def copies_of(window: Iterable[Found]) -> Mapping[int, Sequence[Copy]]:
    """Readable copies of each owner's part of a window, the first one's bytes in all of them.

    Raises RefusedWindow: no file of an owner can be read.
    """
    copies: dict[int, list[Copy]] = {}
    refusals: dict[int, list[str]] = {}
    for one in window:
        try:
            own = copies.setdefault(one.rank, [])
            copy = _opened(one.path)
        except RefusedWindow as refusal:
            refusals.setdefault(one.rank, []).append(str(refusal))
            continue
        # A copy of other bytes has the same name: it must not stand in for a damaged record.
        if not own or _records(copy) == _records(own[0]):
            own.append(copy)
    for owner, own in copies.items():
        if not own:
            raise RefusedWindow('; '.join(refusals[owner]))
    return copies


def _records(copy: Copy) -> list[object]:
    return [header.records for header in copy.headers]


def _opened(path: Path) -> Copy:
    if not path.parent.name.startswith(STUB):
        return copy_in_file(path)
    if not base_path(path).exists():
        raise RefusedWindow('the window that it belongs to is not there', path)
    return copy_in_memory(path)
