# SPDX-License-Identifier: Apache-2.0
"""Tells for each window whether a job with the given flags would resume from it."""

import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron.moevement.seams import cpu_device, preflight
from moevement_ext.memory.window.expected import Expected
from moevement_ext.memory.window.reader import WindowReader
from moevement_ext.system import user_errors
from tools.windows.choosing import by_window, missing
from tools.windows.found import DISK, Found


class Said(NamedTuple):
    """The answer for one window."""

    window: str
    loads: bool
    words: str

    def __str__(self) -> str:
        return f'{self.window}: {"goes on" if self.loads else "no"}, {self.words}'


def said_of(found: Sequence[Found], flags: Sequence[str], ranks: int | None) -> Iterator[Said]:
    """Answers for all windows below a directory, run by run, the newest first.

    Args:
        found: files of all windows.
        flags: all flags of `pretrain_gpt.py`.
        ranks: world size; None: as many as the windows had, or else the fewest for the flags.
    """
    with user_errors.in_one_line():
        preflight.check_installation()
    if cpu_device.needed():
        cpu_device.install()
    for run in sorted({one.run for one in found}):
        for files in by_window([one for one in found if one.run == run]):
            yield _said(files, flags, ranks)


def _said(files: Sequence[Found], flags: Sequence[str], ranks: int | None) -> Said:
    with warnings.catch_warnings(action='ignore'):  # of missing packages: no training here
        from megatron.moevement.offline.trying import answer

    first = files[0]
    name = f'{first.run}, window {first.window}'
    absent = missing(files)
    if absent:
        return Said(name, False, f'there is none of the ranks {", ".join(map(str, absent))} here')
    with WindowReader(first.path) as reader:
        header = reader.verify_identity(Expected())[0]
    with warnings.catch_warnings(action='ignore'):
        return Said(name, *answer(header, flags, ranks, first.root, first.tier == DISK))
