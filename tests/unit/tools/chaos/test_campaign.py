# SPDX-License-Identifier: Apache-2.0
"""What a campaign compares with, and what it says in the end."""

import argparse
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tools.chaos import campaign as campaigns
from tools.chaos.__main__ import parse_arguments, verdict
from tools.chaos.campaign import Campaign
from tools.chaos.results import NAME, Begun, FaultRecord, JobDone, Refused, Results
from tools.lab.evidence import Tier


def fault(tier: Tier = Tier.LOCALIZED, lost: int = 0) -> FaultRecord:
    return FaultRecord('kill rank 1', 40, tier, 4, lost, 3.0)


def done(number: int, *faults: FaultRecord, identical: bool = True, **fields: Any) -> JobDone:
    return JobDone(
        number, 0, 'pp2-ep2', list(faults), identical, **{'survivors_lost': [], **fields}
    )


def test_lines_keep_their_names_and_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / NAME
    before = Results(path)
    before.add(Begun(['--faults', '9'], 7))
    before.add(Refused(2, 'pp4', 'ValueError'))
    before.add(done(1, fault(Tier.DISK)))
    assert path.read_text().splitlines()[2] == (
        '{"type":"job","number":1,"configuration":0,"what":"pp2-ep2","struck":[{"fault":'
        '"kill rank 1","iteration":40,"tier":"disk","replayed":4,'
        '"lost":0,"seconds":3.0}],"identical":true,"survivors_lost":[],"failed":""}'
    )
    after = Results(path)
    assert (after.begun.seed, after.jobs) == (7, before.jobs)
    assert (after.refusals(2), after.refusals(1)) == (1, 0)


def test_summary_counts_faults_and_losses(tmp_path: Path) -> None:
    results = Results(tmp_path / NAME)
    results.add(done(1, fault(), fault()))
    results.add(done(2, fault(Tier.DISK, lost=7), survivors_lost=['rank 2'], identical=False))
    assert results.summary() == (
        'chaos: faults=3 localized=2 whole_job=0 disk=1 lost_iterations=7 bit_identical=false '
        'survivors_lost=1'
    )


@pytest.mark.parametrize(
    ('job', 'status'),
    [
        (done(1, fault()), 0),
        (done(1, fault(lost=1)), 1),
        (done(1, fault(), identical=False), 1),
        (done(1, fault(), survivors_lost=['rank 2']), 1),
        (done(1, fault(), failed='stands still'), 2),
        (done(1), 1),
    ],
)
def test_exit_status_follows_the_results(job: JobDone, status: int, tmp_path: Path) -> None:
    results = Results(tmp_path / NAME)
    results.add(job)
    assert verdict(argparse.Namespace(faults=1), results) == status


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    args = parse_arguments(['--faults', '24', '--seed', '90210'])
    return Campaign(tmp_path, Path(), args, Results(tmp_path / NAME), Console(quiet=True))


def test_a_reference_serves_all_windows_but_no_other_flags(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a configuration that was drawn again."""
    folders = []

    def no_job(launch: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(campaigns, 'train', no_job)
    monkeypatch.setattr(Campaign, '_anew', lambda self, name: folders.append(name))
    for job in range(1, 13):
        with pytest.raises(InterruptedError):
            campaign._plain(0, 0, campaign.draw(job, 0, 0))
    assert len(set(folders)) == 1
    monkeypatch.setattr(Campaign, '_iterations', lambda self, _: 74)
    with pytest.raises(InterruptedError):
        campaign._plain(0, 0, campaign.draw(1, 0, 0))
    assert len(set(folders)) == 2
