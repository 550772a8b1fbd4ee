# SPDX-License-Identifier: Apache-2.0
"""Parts of the suite with about equal durations."""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

DURATIONS = Path(__file__).with_name('durations.json')
"""Seconds by test file, written by `scripts/test.sh --record`."""
UNKNOWN_S = 5.0
"""Assumed seconds for each case of a file without a record."""


class Shard(NamedTuple):
    """One part of the suite, counted from 1."""

    number: int
    parts: int

    @classmethod
    def parse(cls, text: str) -> 'Shard':
        """Parse `2/3`; for argparse, which adds the flag to the error."""
        index, slash, count = text.partition('/')
        if not (slash and index.isdecimal() and count.isdecimal()):
            raise argparse.ArgumentTypeError(f'{text!r} is not like 1/3')
        if not 1 <= int(index) <= int(count):
            raise argparse.ArgumentTypeError(
                f'{text!r}: parts go from 1/{count} to {count}/{count}'
            )
        return cls(int(index), int(count))

    def __str__(self) -> str:
        return f'{self.number}/{self.parts}'

    def files(self, files_of_cases: Iterable[str], seconds: Mapping[str, float]) -> set[str]:
        """Test files of this part: longest first, each to the part with the least total so far."""
        cases = Counter(files_of_cases)
        weights = {file: seconds.get(file, count * UNKNOWN_S) for file, count in cases.items()}
        loads = [0.0] * self.parts
        mine = set()
        for file in sorted(weights, key=lambda file: (-weights[file], file)):
            least = loads.index(min(loads))
            loads[least] += weights[file]
            if least == self.number - 1:
                mine.add(file)
        return mine


def recorded() -> dict[str, float]:
    return json.loads(DURATIONS.read_text('utf-8')) if DURATIONS.exists() else {}


def record(seconds_of_cases: Mapping[str, float]) -> None:
    """Update `DURATIONS` for the files of these cases, given by node id."""
    found: dict[str, float] = {}
    for case, seconds in seconds_of_cases.items():
        file = case.partition('::')[0]
        found[file] = found.get(file, 0.0) + seconds
    merged = {**recorded(), **found}
    kept = {file: round(seconds, 1) for file, seconds in sorted(merged.items())}
    DURATIONS.write_text(json.dumps(kept, indent=0) + '\n', 'utf-8')
