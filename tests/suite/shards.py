# SPDX-License-Identifier: Apache-2.0
"""Parts of the suite with about equal durations."""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.suite.selection import ROOT

DURATIONS = Path(__file__).with_name('durations.json')
"""`Recorded` by test file, written by `scripts/test.sh --record`."""
UNKNOWN_S = 5.0
"""Assumed seconds for each case that is not recorded."""


class Recorded(NamedTuple):
    """One test file in the run that most of its cases were in."""

    seconds: float
    cases: int


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

    def files(self, files_of_cases: Iterable[str], known: Mapping[str, Recorded]) -> set[str]:
        """Test files of this part: longest first, each to the part with the least total so far."""
        weights = {}
        for file, count in Counter(files_of_cases).items():
            entry = known.get(file, Recorded(0.0, 0))
            weights[file] = entry.seconds + UNKNOWN_S * max(0, count - entry.cases)
        loads = [0.0] * self.parts
        mine = set()
        for file in sorted(weights, key=lambda file: (-weights[file], file)):
            least = loads.index(min(loads))
            loads[least] += weights[file]
            if least == self.number - 1:
                mine.add(file)
        return mine


def recorded() -> dict[str, Recorded]:
    if not DURATIONS.exists():
        return {}
    found = json.loads(DURATIONS.read_text('utf-8'))
    return {file: Recorded(*entry) for file, entry in found.items()}


def record(outcomes: Mapping[str, Mapping[str, Any]]) -> None:
    """Update `DURATIONS` for the files of these cases, given by node id, but of failed ones.

    A file of which more cases are recorded than ran now keeps its record: the default suite leaves
    out cases of a file that the thorough one runs. Files that no longer exist are dropped.
    """
    merged = recorded()
    seconds_of_cases = {
        case: one['seconds'] for case, one in outcomes.items() if one['outcome'] != 'failed'
    }
    cases = Counter(map(_file, seconds_of_cases))
    for file, count in cases.items():
        if file not in merged or merged[file].cases <= count:
            seconds = sum(s for case, s in seconds_of_cases.items() if _file(case) == file)
            merged[file] = Recorded(round(seconds, 1), count)
    kept = {file: entry for file, entry in sorted(merged.items()) if (ROOT / file).is_file()}
    lines = (f'{json.dumps(file)}: {json.dumps(entry)}' for file, entry in kept.items())
    DURATIONS.write_text('{\n' + ',\n'.join(lines) + '\n}\n', 'utf-8')


def _file(case: str) -> str:
    return case.partition('::')[0]
