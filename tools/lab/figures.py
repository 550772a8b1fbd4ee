# SPDX-License-Identifier: Apache-2.0
"""Small statistics, and the files that tools write."""

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `target` once all is written.

    Its folder is made. What is there and no file (a device, a pipe) is written to as it is.
    """
    if target.exists() and not target.is_file():
        yield target
        return
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f'.{os.getpid()}-{target.name}')
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def write_json(target: Path, report: Any) -> None:
    """Write `report` (anything msgspec encodes), indented, as a whole; its folder is made."""
    content = msgspec.json.format(msgspec.json.encode(_rounded(report)), indent=2) + b'\n'
    with replacing(target) as partial:
        partial.write_bytes(content)


def _rounded(value: Any) -> Any:
    """With 5 significant digits; a benchmark has no more."""
    plain = msgspec.to_builtins(value)
    if isinstance(plain, dict):
        return {key: _rounded(item) for key, item in plain.items()}
    if isinstance(plain, list):
        return [_rounded(item) for item in plain]
    return float(f'{plain:.5g}') if isinstance(plain, float) else plain
