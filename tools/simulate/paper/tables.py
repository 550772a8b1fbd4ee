# SPDX-License-Identifier: Apache-2.0
"""The numbers that the paper prints, from `paper.json` beside this module.

Unreadable cells are None. The notes of each table list corrections.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec

CHECKFREQ, GEMINI, MOC, MOEVEMENT = 'CheckFreq', 'Gemini', 'MoC', 'MoEvement'
DENSE = (CHECKFREQ, GEMINI)


class SystemRows(msgspec.Struct, frozen=True):
    """Rows of one system in one setting: a value per MTBF, or one value for all MTBFs."""

    interval: list[int | None]
    """Iterations between checkpoints."""
    overhead_s: list[float | None]
    """Seconds added to each iteration on average."""
    overhead_percent: list[float | None]
    recovery_s: list[float | None]
    """Seconds of all recoveries of a run."""
    ettr: list[float | None]


class Setting(msgspec.Struct, frozen=True):
    """A model, or a choice of precisions."""

    name: str
    params_e9: float
    iteration_s: float
    """Not printed: derived from MoC's overhead in seconds and in percent."""
    window: int
    full_bytes: int
    """Bytes of master weight and optimizer moments per parameter."""
    weight_bytes: int
    """Bytes of a compute weight."""
    systems: dict[str, SystemRows]


class Table(msgspec.Struct, frozen=True):
    """Table 3 or Table 7."""

    name: str
    run_s: float
    gpus: int
    mtbf_s: dict[str, float]
    """Mean seconds between failures, by the name of the column."""
    settings: list[Setting]
    notes: list[tuple[str, str]]
    """A cell, and its unreadable or corrected value."""

    def setting(self, name: str) -> Setting:
        return next(setting for setting in self.settings if setting.name == name)


class Condition(NamedTuple):
    """The paper's values for a system at one MTBF."""

    table: str
    setting: Setting
    system: str
    mtbf: str
    mtbf_s: float
    interval: int
    overhead_s: float
    ettr: float | None
    recovery_s: float | None
    failures: float
    """Expected number of failures in a run."""

    @property
    def row(self) -> tuple[str, str, str]:
        return self.table, self.setting.name, self.system


class MemoryRow(msgspec.Struct, frozen=True):
    """A row of Table 6, in GB (1e9 bytes)."""

    name: str
    params_e9: float
    window: int
    gemini_gb: float
    windows_gb: float
    logs_gb: float
    total_gb: float
    more_percent: float


class _Paper(msgspec.Struct, frozen=True):
    tables: list[Table]
    memory: list[MemoryRow]
    text: dict[str, Any]


@cache
def _paper() -> _Paper:
    return msgspec.json.decode(files(__package__).joinpath('paper.json').read_bytes(), type=_Paper)


def ettr_tables() -> dict[str, Table]:
    """Tables 3 and 7 by name."""
    return {table.name: table for table in _paper().tables}


def memory_table() -> list[MemoryRow]:
    """Table 6."""
    return _paper().memory


def prose() -> dict[str, Any]:
    """Numbers of the text and of the figures."""
    return _paper().text


def conditions(table: Table, setting: Setting, system: str) -> list[Condition]:
    """Conditions, one for each MTBF of the table; intervals and overheads are all readable."""
    rows, found = setting.systems[system], []
    for index, (mtbf, mtbf_s) in enumerate(table.mtbf_s.items()):
        interval, overhead_s = value_at(rows.interval, index), value_at(rows.overhead_s, index)
        assert interval is not None and overhead_s is not None
        of_mtbf = rows.ettr[index], rows.recovery_s[index], table.run_s / mtbf_s
        given = table.name, setting, system, mtbf, mtbf_s, int(interval), overhead_s
        found.append(Condition(*given, *of_mtbf))
    return found


def rows(
    names: Sequence[str] = ('Table 3', 'Table 7'), systems: Sequence[str] = ()
) -> Iterator[list[Condition]]:
    """Conditions of each setting and system; all systems by default."""
    for name in names:
        table = ettr_tables()[name]
        for setting in table.settings:
            for system in systems or setting.systems:
                yield conditions(table, setting, system)


def value_at[Number: (int | None, float | None)](row: list[Number], index: int) -> Number:
    """Value of a row in column `index`; a row with one value has it in every column."""
    return row[index] if len(row) > 1 else row[0]
