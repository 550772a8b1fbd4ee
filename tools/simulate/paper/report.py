# SPDX-License-Identifier: Apache-2.0
"""All comparisons with the paper, and how many numbers follow."""

from collections.abc import Iterable

import msgspec

from tools.simulate.paper import claims, figures, fit, memory, tables
from tools.simulate.paper.cells import all_cells
from tools.simulate.paper.compare import Cell, Claim, Verdict


class Count(msgspec.Struct, frozen=True):
    """Cells of one system and quantity, over all tables."""

    system: str
    quantity: str
    cells: int
    follow: int
    fitted_follow: int | None
    """With the fitted constants; None where nothing is fitted."""


class Report(msgspec.Struct, frozen=True):
    """Everything that was recomputed."""

    iteration_s: dict[str, dict[str, float]]
    """Iteration times by table and setting, which the paper does not print."""
    cells: list[Cell]
    constants: list[fit.Constants]
    """All that was fitted per setting and system."""
    claims: list[Claim]
    counts: list[Count]
    notes: list[tuple[str, str, str]]
    """Table, cell, and what was unreadable or mended."""

    def count(self, system: str, quantity: str) -> Count:
        """The count of one system and quantity."""
        return next(one for one in self.counts if (one.system, one.quantity) == (system, quantity))


def recompute() -> Report:
    """Recompute every readable cell of Tables 3, 6 and 7, and the claims of text and figures."""
    constants = fit.fit_all()
    fits = {(one.table, one.setting, one.system): one for one in constants}
    cells = [*all_cells(fits), *memory.table6_cells()]
    known = tables.ettr_tables()
    return Report(
        {
            name: {setting.name: setting.iteration_s for setting in table.settings}
            for name, table in known.items()
        },
        cells,
        constants,
        [*claims.all_claims(), *figures.all_claims(fits)],
        count(cells),
        [(name, *note) for name, table in known.items() for note in table.notes],
    )


def count(cells: Iterable[Cell]) -> list[Count]:
    """How many of the cells that can be judged follow, by system and quantity."""
    kinds: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if cell.verdict in (Verdict.FOLLOWS, Verdict.DIFFERS):
            kinds.setdefault((cell.system, cell.quantity), []).append(cell)
    return [
        Count(
            *kind,
            len(found),
            sum(cell.verdict == Verdict.FOLLOWS for cell in found),
            (
                sum(cell.fitted_verdict == Verdict.FOLLOWS for cell in found)
                if found[0].fitted_verdict
                else None
            ),
        )
        for kind, found in kinds.items()
    ]
