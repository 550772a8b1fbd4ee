# SPDX-License-Identifier: Apache-2.0
"""Small statistics, and the file that a benchmark writes."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """The same figure of several rounds."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> 'Spread':
        """The spread of at least one value."""
        return cls(min(values), statistics.median(values), max(values))

    def text(self, digits: int = 2) -> str:
        """Median, and the range where there is one."""
        if self.min == self.max:
            return f'{self.median:.{digits}f}'
        return f'{self.median:.{digits}f}  ({self.min:.{digits}f} to {self.max:.{digits}f})'


def write_json(target: Path, report: Any) -> None:
    """Write `report` (anything msgspec encodes), indented; its folder is made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(msgspec.json.format(msgspec.json.encode(_rounded(report)), indent=2) + b'\n')


def _rounded(value: Any) -> Any:
    """With 5 significant digits; a benchmark has no more."""
    plain = msgspec.to_builtins(value)
    if isinstance(plain, dict):
        return {key: _rounded(item) for key, item in plain.items()}
    if isinstance(plain, list):
        return [_rounded(item) for item in plain]
    return float(f'{plain:.5g}') if isinstance(plain, float) else plain
