# SPDX-License-Identifier: Apache-2.0
"""The placement tool: both commands, their JSON and their refusals."""

import json
from typing import Any

import pytest

from tools.placement import main


def found(capsys: pytest.CaptureFixture[str], *flags: str) -> Any:
    assert main([*flags, '--json']) == 0
    return json.loads(capsys.readouterr().out)


def test_copies_of_ranks_are_placed(capsys: pytest.CaptureFixture[str]) -> None:
    report = found(capsys, 'ranks', '--nodes', '12', '--gpus-per-node', '2', '--failed', '3')
    assert report['ranks'] == 24
    one, two, three = report['placements']
    assert [lost['probability'] for lost in three['survival']] == [1.0, 1.0, 1.0]
    assert one['survival'][1]['probability'] == pytest.approx(1 - 12 / 66)
    assert two['load'] == [2, 2]


def test_copies_stay_below_a_switch_and_count_data_parallel_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ('ranks', '--nodes', '8', '--gpus-per-node', '2', '--nodes-per-switch', '4')
    one, *_ = found(capsys, *flags, '--failed', '1')['placements']
    assert (one['holders'], one['mean_distance']) == (1, 0.0)
    one, two, _ = found(capsys, *flags, '--same-state', '2', '--failed', '1')['placements']
    assert (one['holders'], two['holders']) == (0, 1)
    assert one['survival'][0]['probability'] == 1.0


def test_replicas_of_experts_are_placed(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ('--nodes', '10', '--slots', '6', '--experts', '16', '--skew', '2')
    report = found(capsys, 'experts', *flags)
    assert sum(report['replicas']) == 60
    assert report['representatives_fit'] is True
    assert report['maximum_rank_overlap'][3] > 0.7 > 0.5 > report['spread'][3]


def test_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(['ranks', '--nodes', '4']) == 0
    assert 'Probability that nothing is lost' in capsys.readouterr().out
    assert main(['experts', '--nodes', '4', '--slots', '2', '--experts', '3', '--least', '1']) == 0
    assert 'Probability that every expert survives' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('flags', 'problem'),
    [
        (['ranks', '--nodes', '2', '--failed', '3'], '--failed 3: there are 2 nodes'),
        (['ranks', '--nodes', '2', '--failed', '1', '--same-state', '3'], 'must divide'),
        (['experts', '--nodes', '4', '--slots', '1', '--experts', '3'], 'need more than the 4'),
    ],
)
def test_impossible_input_is_refused(
    flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize('skew', ['nan', 'inf', '1e5', 'much'])
def test_a_skew_that_cannot_be_is_named(capsys: pytest.CaptureFixture[str], skew: str) -> None:
    flags = 'experts --nodes 10 --slots 6 --experts 16 --skew'.split()
    with pytest.raises(SystemExit) as raised:
        main([*flags, skew])
    assert raised.value.code == 2
    assert f'--skew: {skew}: give a number from -100 to 100' in capsys.readouterr().err


def test_numbers_below_one_are_refused() -> None:
    with pytest.raises(SystemExit):
        main(['ranks', '--nodes', '0'])
