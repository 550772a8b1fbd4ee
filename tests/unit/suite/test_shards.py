# SPDX-License-Identifier: Apache-2.0
"""Each file is in one shard, and the shards take about equal time."""

from pathlib import Path

import pytest

from tests.suite import shards
from tests.suite.shards import Recorded, Shard


def test_shards_are_balanced_and_complete() -> None:
    known = {f'file{i}': Recorded(float(2 ** (i % 7)), 1) for i in range(40)}
    files = [*known, 'new']
    parts = [Shard(number, 3).files(files, known) for number in (1, 2, 3)]
    assert sorted(file for part in parts for file in part) == sorted(files)
    unknown = Recorded(shards.UNKNOWN_S, 1)
    loads = [sum(known.get(file, unknown).seconds for file in part) for part in parts]
    assert max(loads) - min(loads) <= shards.UNKNOWN_S


def passed(seconds: dict[str, float]) -> dict[str, dict[str, object]]:
    return {case: {'outcome': 'passed', 'seconds': each} for case, each in seconds.items()}


def test_durations_of_executed_files_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, 'DURATIONS', tmp_path / 'durations.json')
    monkeypatch.setattr(shards, 'ROOT', tmp_path)
    for file in 'abc':
        (tmp_path / f'{file}.py').touch()
    shards.record(
        passed({'a.py::x': 2.0, 'a.py::y[1::2]': 1.04, 'b.py::x': 5.0, 'gone.py::x': 0.2})
    )
    assert shards.recorded() == {'a.py': (3.0, 2), 'b.py': (5.0, 1)}
    # The default suite runs fewer cases of `a.py` than the thorough suite.
    shards.record(passed({'a.py::x': 9.0, 'b.py::x': 0.1, 'c.py::x': 1.0}))
    assert shards.recorded() == {'a.py': (3.0, 2), 'b.py': (0.1, 1), 'c.py': (1.0, 1)}
    (tmp_path / 'a.py').unlink()
    shards.record(passed({'c.py::x': 1.0, 'c.py::y': 1.0}))
    assert shards.recorded() == {'b.py': (0.1, 1), 'c.py': (2.0, 2)}
    shards.record({'b.py::x': {'outcome': 'failed', 'seconds': 60.0}})
    assert shards.recorded()['b.py'] == (0.1, 1)
