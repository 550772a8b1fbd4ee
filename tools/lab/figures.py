# SPDX-License-Identifier: Apache-2.0
"""Simple statistics, and output files."""

import itertools
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """A figure over several rounds."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> 'Spread':
        return cls(min(values), statistics.median(values), max(values))


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a path to write to, which replaces `target` at the end.

    The folder is created. If `target` exists and is not a regular file (a device, a pipe), it is
    written directly.
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
    """Write `report` (any type of msgspec) as indented JSON, atomically; the folder is created."""
    content = msgspec.json.format(msgspec.json.encode(_rounded(report)), indent=2) + b'\n'
    with replacing(target) as partial:
        partial.write_bytes(content)


def print_json(value: object) -> None:
    """Print to standard output; infinity, which JSON lacks, becomes null."""
    encoded = msgspec.json.encode(value, enc_hook=float)  # msgspec does not encode NumPy's floats
    print(msgspec.json.format(encoded, indent=2).decode())


def _rounded(value: Any) -> Any:
    """Round floats to 5 significant digits; a benchmark is no more precise."""
    plain = msgspec.to_builtins(value)
    if isinstance(plain, dict):
        return {key: _rounded(item) for key, item in plain.items()}
    if isinstance(plain, list):
        return [_rounded(item) for item in plain]
    return float(f'{plain:.5g}') if isinstance(plain, float) else plain


def medians(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Median of each name, 0 where it is missing."""
    names = dict.fromkeys(itertools.chain.from_iterable(found))
    return {name: statistics.median(one.get(name, 0.0) for one in found) for name in names}
