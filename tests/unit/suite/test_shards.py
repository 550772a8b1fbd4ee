# SPDX-License-Identifier: Apache-2.0
"""All files are in one shard each, and the shards take about as long."""

import argparse
import json
from pathlib import Path

import pytest

from tests.suite import shards
from tests.suite.shards import Shard


def test_shards_are_balanced_and_whole() -> None:
    seconds = {f'file{i}': float(2 ** (i % 7)) for i in range(40)}
    files = [*seconds, 'new']
    parts = [Shard(number, 3).files(files, seconds) for number in (1, 2, 3)]
    assert sorted(file for part in parts for file in part) == sorted(files)
    loads = [sum(seconds.get(file, shards.UNKNOWN_S) for file in part) for part in parts]
    assert max(loads) - min(loads) <= shards.UNKNOWN_S


def test_files_that_were_never_recorded_weigh_by_their_cases() -> None:
    cases = [*['many'] * 6, 'few', 'fewer', *['some'] * 4]
    assert [Shard(number, 2).files(cases, {}) for number in (1, 2)] == [
        {'many'},
        {'few', 'fewer', 'some'},
    ]


def test_a_shard_is_read_from_text() -> None:
    assert Shard.parse('2/3') == Shard(2, 3)
    assert str(Shard(2, 3)) == '2/3'
    for wrong in ('2', '0/3', '4/3', 'a/b', '1/0', '-1/2'):
        with pytest.raises(argparse.ArgumentTypeError, match=wrong):
            Shard.parse(wrong)


def test_durations_of_files_that_ran_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / 'durations.json'
    monkeypatch.setattr(shards, 'DURATIONS', file)
    shards.record({'a.py::x': 2.0, 'a.py::y[1::2]': 1.04, 'b.py::x': 5.0, 'short.py::x': 0.2})
    assert json.loads(file.read_text()) == {'a.py': 3.0, 'b.py': 5.0, 'short.py': 0.2}
    shards.record({'b.py::x': 0.1, 'c.py::x': 1.0})
    assert shards.recorded() == {'a.py': 3.0, 'b.py': 0.1, 'c.py': 1.0, 'short.py': 0.2}
