# SPDX-License-Identifier: Apache-2.0
"""Reports for each window whether a job with the given flags would resume from it."""

import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.reader import WindowReader

from ..lab.trainer_flags import prepare_megatron
from .found import DISK, Found, by_run, by_window, missing


class Said(NamedTuple):
    """The answer for one window."""

    window: str
    loads: bool
    words: str

    def __str__(self) -> str:
        return f'{self.window}: {"goes on" if self.loads else "no"}, {self.words}'


def said_of(found: Sequence[Found], flags: Sequence[str], ranks: int | None) -> Iterator[Said]:
    """Answers for all windows below a directory, run by run, the newest first.

    `ranks` None: the number of ranks that the windows had, or else the fewest for the flags.
    """
    prepare_megatron()
    for _, own in sorted(by_run(found).items()):
        for files in by_window(own):
            yield _said(files, flags, ranks)


def _said(files: Sequence[Found], flags: Sequence[str], ranks: int | None) -> Said:
    with warnings.catch_warnings(
        action='ignore'
    ):  # about missing packages, which only training needs
        from megatron.moevement.offline.run_flags import answer

    first = files[0]
    name = f'{first.run}, window {first.window}'
    absent = missing(files)
    if absent:
        return Said(name, False, f'there is none of the ranks {", ".join(map(str, absent))} here')
    with WindowReader(first.path) as reader:
        header = reader.verify_identity(Expected())[0]
    with warnings.catch_warnings(action='ignore'):
        return Said(name, *answer(header, flags, ranks, first.root, first.tier == DISK))
