# SPDX-License-Identifier: Apache-2.0
"""The suite: how it is divided, what is recorded, which results are tried again."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.suite import phases, sessions, shards
from tests.suite.sessions import Outcomes, Result, tried_again
from tests.suite.shards import Recorded, Shard

pytest_plugins = ['pytester']


def test_outcomes_of_all_cases_are_recorded(pytester: pytest.Pytester, tmp_path: Path) -> None:
    pytester.makepyfile(
        test_some="""
            import pytest

            @pytest.fixture
            def breaks_afterwards():
                yield
                raise ValueError('torn')

            def test_green(): pass
            def test_red(): assert 1 == 2
            def test_bits():
                import torch
                assert torch.equal(torch.ones(1), torch.zeros(1))
            def test_skipped(): pytest.skip('no')
            def test_torn(breaks_afterwards): pass
        """,
        test_unreadable='raise OSError',
    )
    file = tmp_path / 'outcomes.json'
    pytester.inline_run('--continue-on-collection-errors', plugins=[Outcomes(file)])
    found = json.loads(file.read_text())
    assert {case: one['outcome'] for case, one in found.items()} == {
        'test_some.py::test_green': 'passed',
        'test_some.py::test_red': 'failed',
        'test_some.py::test_bits': 'failed',
        'test_some.py::test_skipped': 'skipped',
        'test_some.py::test_torn': 'failed',
        'test_unreadable.py': 'failed',
    }
    assert len(found['test_some.py::test_red']['load']) == 3
    assert not found['test_some.py::test_red']['bits'] and found['test_some.py::test_bits']['bits']
    assert 'ValueError' in found['test_some.py::test_torn']['error']


@pytest.fixture
def flaky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sessions, 'RESULTS', tmp_path)
    monkeypatch.setattr(sessions, 'FLAKY', tmp_path / 'flaky.jsonl')
    return tmp_path / 'flaky.jsonl'


def failed(*cases: str) -> Result:
    outcomes = {case: {'outcome': 'failed', 'load': [9, 9, 9], 'bits': False} for case in cases}
    return Result('timed', red=list(cases), outcomes=outcomes)


def test_case_that_passes_alone_is_recorded_as_flaky(
    flaky: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alone(name: str, cases: Sequence[str]) -> Result:
        assert cases == ['a', 'b', 'c']
        outcomes = {'a': {'outcome': 'passed'}, 'b': {'outcome': 'failed'}}
        return Result(name, red=['b'], outcomes=outcomes)  # c did not run

    monkeypatch.setattr(sessions, 'session', alone)
    result = tried_again(failed('a', 'b', 'c'))
    assert (result.red, result.flaky) == (['b', 'c'], ['a'])
    (line,) = flaky.read_text().splitlines()
    assert json.loads(line)['case'] == 'a' and json.loads(line)['load'] == [9, 9, 9]


def test_bit_differences_are_not_retried(flaky: Path) -> None:
    """Nor a session that crashed, nor another phase than `timed`."""
    result = failed('a')
    result.outcomes['a']['bits'] = True
    assert tried_again(result).red == ['a']
    assert tried_again(Result('timed', red=['the session ended with exit status 3'])).red
    assert not flaky.exists()
    assert [phase.name for phase in phases.phases(thorough=True) if phase.retried] == ['timed']


def test_shards_are_balanced_and_complete() -> None:
    known = {f'file{i}': Recorded(float(2 ** (i % 7)), 1) for i in range(40)}
    files = [*known, 'new']
    parts = [Shard(number, 3).files(files, known) for number in (1, 2, 3)]
    assert sorted(file for part in parts for file in part) == sorted(files)
    unknown = Recorded(shards.UNKNOWN_S, 1)
    loads = [sum(known.get(file, unknown).seconds for file in part) for part in parts]
    assert max(loads) - min(loads) <= shards.UNKNOWN_S
