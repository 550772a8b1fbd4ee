# SPDX-License-Identifier: Apache-2.0
"""Makes a dense checkpoint from windows: the run resumes from them briefly, and saves.

Windows hold the states of several iterations, and only a replay combines them. So this module
launches the run's own program with its own flags; the program converts the window, trains one
iteration, and ends with upstream's save. It ends after its first iteration, not after a given
one: it may find the newest window damaged, or a newer window that this node does not see.
"""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from moevement_ext.config import OFF
from moevement_ext.job.exporting import VARIABLE
from moevement_ext.memory.shelf import base_of

from ..lab.errors import LabError
from ..lab.trainer_flags import value_of
from .found import DISK, Found, complete
from .pruning import live_runs

TORCH_DIST = 'torch_dist'
_TRACKER = 'latest_checkpointed_iteration.txt'


class Source(NamedTuple):
    """The windows of one finished run."""

    run: str
    flags: list[str]
    """Flags with which the program finds the windows."""
    tier: str
    """`found.MEMORY` or `found.DISK`."""
    dense_at: int
    """Iteration that a conversion of the newest window results in."""


def source(found: Sequence[Found], directory: Path) -> Source:
    """Find the windows to export below a directory.

    Raises LabError: there is no complete window of a finished run, or there are several runs.
    """
    run = one_run(found, directory)
    windows = complete(found)[run]
    if not windows:
        raise LabError(f'{directory}: no window is whole on all ranks that are seen there')
    newest = next(one for one in found if one.window == windows[0] and one.sound)
    assert newest.slots is not None
    on_disk = newest.tier == DISK
    root = newest.path.parents[2 if on_disk else 4]
    flag = '--sparse-ckpt-disk' if on_disk else '--sparse-ckpt-dir'
    flags = [flag, str(root), '--sparse-ckpt-run-id', run]
    return Source(run, flags, newest.tier, newest.start + newest.slots - 1)


def one_run(found: Sequence[Found], directory: Path) -> str:
    """Name of the run below a directory.

    Raises LabError: there is none, or there are several, or it has not ended.
    """
    runs = sorted({one.run for one in found})
    if len(runs) != 1:
        names = ', '.join(runs) or 'none'
        raise LabError(f'{directory}: name the directory of one run; there is {names}')
    if live_runs(found):
        raise LabError(f'{runs[0]}: a process lives; end the job first, or let it save by itself')
    return runs[0]


def export(source: Source, output: Path, command: Sequence[str]) -> int:
    """Launch the run once more, to save in `output`; returns the iteration of the checkpoint.

    Raises LabError: the run has a newer dense checkpoint, or did not save.
    """
    if saved_in(output) is not None:
        raise LabError(f'--output {output}: there is a checkpoint already; name another one')
    load = value_of(command, '--load')
    dense = None if load is None else saved_in(Path(load))
    if dense is not None and dense >= source.dense_at:
        raise LabError(
            f'--load {load} has iteration {dense}, and the windows none after it: use that'
        )
    launched = [*command, *_flags(source, output, command)]
    done = subprocess.run(launched, check=False, env={**os.environ, VARIABLE: source.tier})
    saved = saved_in(output)
    if done.returncode != 0 or saved is None:
        raise LabError(
            f'the run ended with status {done.returncode} and saved no checkpoint in {output}; '
            'its output says why'
        )
    return saved


def _flags(source: Source, output: Path, command: Sequence[str]) -> list[str]:
    """Flags of the launch; the last value of a flag counts."""
    flags = list(source.flags)
    if (value_of(command, '--sparse-ckpt-elastic') or OFF) != OFF:
        # It finds the directory of the layout by itself.
        flags[-1] = base_of(source.run)
    flags += ['--save', str(output.absolute()), '--ckpt-format', TORCH_DIST]
    flags += ['--save-interval', '1', '--exit-interval', '1']
    if '--use-distributed-optimizer' in command:  # for other layouts to load its state
        flags.append('--dist-ckpt-optim-fully-reshardable')
    return flags


def saved_in(directory: Path) -> int | None:
    """Iteration of the newest checkpoint in `directory`; None without one."""
    tracker = directory / _TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(errors='replace').strip()
    return int(text) if text.isdecimal() else None
