# SPDX-License-Identifier: Apache-2.0
"""The rows of a comparison, as `rows.toml` declares them."""

import enum
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import msgspec

from moevement_ext.config import AUTO

from ..lab import models


class Keeps(enum.StrEnum):
    """Storage of the state that a row recovers from."""

    NOTHING = 'nothing'
    DISK = 'disk'
    """Checkpoints of Megatron."""
    MEMORY = 'memory'
    """Host memory, by sparse checkpointing."""


class Row(msgspec.Struct, frozen=True):
    """A way to survive failures."""

    title: str
    keeps: Keeps
    flags: str = ''
    """Further flags of the trainer; names in braces are filled in, see `training_flags`."""
    exact: bool = True
    """The row promises the bits of a run without failures."""
    lossy: bool = False
    """Recovers without some updates of experts."""
    restarts_all: bool = False
    """Every failure restarts all workers."""
    spares: int = 0
    """Hot spares; with --quick each job has one."""
    asynchronous: bool = False
    """Saves of Megatron in the background."""
    copies: bool = False
    """Optimizers of data-parallel ranks are copies of each other; experts are not sharded."""
    settings: str = ''
    """Settings without a flag, as in a file of settings."""
    ablation: bool = False
    """Leaves out parts of the method; runs only if it is named."""

    @property
    def throttled(self) -> bool:
        """True if the limits of copies and network apply to the row."""
        return self.keeps is Keeps.MEMORY

    def training_flags(
        self, folder: Path, memory: Path, interval: int, **filled_in: object
    ) -> list[str]:
        """Flags of a job.

        Args:
            folder: folder of the job.
            memory: directory in a tmpfs.
            interval: iterations between two dense checkpoints.
            filled_in: window, mtbf_s, network_gb_per_s, disk (a directory that survives every node)
        """
        more = self.flags.format(**filled_in).split()
        if self.keeps is Keeps.DISK:
            return [*models.dense_flags(folder / 'checkpoints', interval, self.asynchronous), *more]
        if self.keeps is Keeps.MEMORY:
            return [*models.sparse_flags(memory, RUN_ID, AUTO, folder / 'events'), *more]
        return more


def read_rows[R](name: str, kind: type[R]) -> R:
    """Rows of a file of this package, in the order of the table."""
    return msgspec.toml.decode(files(__package__).joinpath(name).read_bytes(), type=kind)


RUN_ID = 'compare'
PLAIN = 'plain'
"""Plain Megatron without failures, the reference of all rows."""
ROWS = read_rows('rows.toml', dict[str, Row])


def named[R](names: str, known: Mapping[str, R]) -> list[str]:
    """Names of rows in a flag. Raises ValueError: there is no such row; the message names it."""
    asked = names.split(',')
    if unknown := [name for name in asked if name not in known]:
        raise ValueError(f'--rows: no row {", ".join(unknown)}; there are {", ".join(known)}')
    return asked


def chosen(names: str, forked: bool) -> dict[str, Row]:
    """Rows by name; `all`: the rows that differ here, except ablations. Raises ValueError."""
    if names == 'all':
        return {
            name: row for name, row in ROWS.items() if not (row.ablation or (forked and row.spares))
        }
    rows = {name: ROWS[name] for name in named(names, ROWS)}
    if forked and (same := [name for name, row in rows.items() if row.spares]):
        raise ValueError(f'{", ".join(same)}: with --quick every worker starts as a hot spare does')
    return rows
