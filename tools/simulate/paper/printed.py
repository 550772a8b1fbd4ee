# SPDX-License-Identifier: Apache-2.0
"""The numbers that the paper prints, from `paper.json` beside this module.

Unreadable cells are None. The notes of each table list corrections.
"""

from importlib.resources import files
from typing import Any, NamedTuple

import msgspec

CHECKFREQ, GEMINI, MOC, MOEVEMENT = 'CheckFreq', 'Gemini', 'MoC', 'MoEvement'
DENSE = (CHECKFREQ, GEMINI)
T3, T7 = 'Table 3', 'Table 7'


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
    systems: dict[str, dict[str, list[float | None]]]
    """By system and quantity: a value per MTBF, or one value for all MTBFs.

    Iterations between checkpoints (`interval`), seconds and percent added to each iteration
    (`overhead_s`, `overhead_percent`), seconds of all recoveries of a run (`recovery_s`), `ettr`.
    """


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


class Statement(msgspec.Struct, frozen=True):
    """Texts of a claim, with fields in braces."""

    source: str
    statement: str
    how: str
    """Inputs of the computed number; mentions any fitted constant."""
    theirs: float | None = None
    tolerance: float = 0.0


class Paper(msgspec.Struct, frozen=True):
    """The whole file."""

    tables: list[Table]
    memory: list[dict[str, Any]]
    """Table 6, in GB (1e9 bytes)."""
    text: dict[str, Any]
    """Numbers of the text and of the figures."""
    claims: dict[str, Statement]
    quantities: dict[str, tuple[str, int]]
    """Title and decimal places of each quantity of the tables."""


class Condition(NamedTuple):
    """The paper's values for a system at one MTBF."""

    setting: Setting
    system: str
    mtbf: str
    mtbf_s: float
    failures: float
    """Expected number of failures in a run."""
    interval: float
    overhead_s: float
    recovery_s: float | None
    ettr: float | None


Row = tuple[str, str, str]
"""Names of a table, a setting and a system."""


def _rows(table: Table, setting: Setting, system: str) -> list[Condition]:
    columns = setting.systems[system]

    def at(name: str, index: int) -> Any:
        return columns[name][index] if len(columns[name]) > 1 else columns[name][0]

    return [
        Condition(setting, system, mtbf, mtbf_s, table.run_s / mtbf_s, *(
            at(name, index) for name in Condition._fields[5:]))
        for index, (mtbf, mtbf_s) in enumerate(table.mtbf_s.items())
    ]  # fmt: skip


PAPER = msgspec.json.decode(files(__package__).joinpath('paper.json').read_bytes(), type=Paper)
TABLES = {table.name: table for table in PAPER.tables}
ROWS: dict[Row, list[Condition]] = {
    (table.name, setting.name, system): _rows(table, setting, system)
    for table in PAPER.tables
    for setting in table.settings
    for system in setting.systems
}
"""Conditions by MTBF, of each row."""
