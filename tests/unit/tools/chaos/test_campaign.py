# SPDX-License-Identifier: Apache-2.0
"""What a campaign compares with, where its faults landed, and what it says in the end."""

import argparse
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moevement_ext.events import RecoveryPhase
from tests.unit.tools.samples import happened
from tools.chaos import campaign as campaigns
from tools.chaos.__main__ import parse_arguments, verdict
from tools.chaos.campaign import Campaign
from tools.chaos.results import (
    NAME,
    Begun,
    Cell,
    FaultRecord,
    JobDone,
    Phase,
    Refused,
    Results,
    landed,
    landing_table,
)
from tools.lab.evidence import Tier
from tools.lab.job import Kind

MEET = Cell(Phase.MEET, Kind.KILL)


def fault(tier: Tier = Tier.LOCALIZED, lost: int = 0, stall_s: float = 3.0) -> FaultRecord:
    return FaultRecord('kill rank 1', [MEET], 40, tier, 4, lost, 3.0, stall_s)


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
        '"kill rank 1","cells":[["meet","kill"]],"iteration":40,"tier":"disk","replayed":4,'
        '"lost":0,"seconds":3.0,"stall_s":3.0}],"identical":true,"survivors_lost":[],"failed":""}'
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
        (done(1, fault(stall_s=15.1)), 1),
        (done(1, fault(), survivors_lost=['rank 2']), 1),
        (done(1, fault(), failed='stands still'), 2),
        (done(1), 1),
    ],
)
def test_exit_status_follows_the_results(job: JobDone, status: int, tmp_path: Path) -> None:
    results = Results(tmp_path / NAME)
    results.add(job)
    assert verdict(argparse.Namespace(max_stall=15.0, faults=1), results) == status


PHASES = [
    happened(RecoveryPhase, rank, time, pid, phase=name)
    for rank, name, time, pid in [
        (0, 'over', 90.0, 10), (1, 'over', 90.0, 11), (0, 'detect', 100.1, 10),
        (0, 'meet', 100.2, 10), (2, 'respawn', 103.0, 99), (2, 'fetch', 103.2, 99),
    ]
]  # fmt: skip


@pytest.mark.parametrize(
    ('first', 'pid', 'at', 'expected'),
    [
        pytest.param(100.0, 10, 100.5, Phase.MEET, id='survivor'),
        pytest.param(100.0, 99, 103.3, Phase.FETCH, id='replacement'),
        pytest.param(100.0, 11, 100.05, Phase.UNNOTICED, id='nobody noticed'),
        pytest.param(100.0, 11, 100.15, Phase.DETECT, id='others noticed'),
        pytest.param(100.0, 12, 101.0, Phase.MEET, id='new and still importing'),
        pytest.param(None, 11, 99.0, Phase.TRAINING, id='first'),
        pytest.param(None, 12, 99.0, Phase.TRAINING, id='first, of a rank without phases'),
    ],
)
def test_fault_lands_in_the_phase_of_its_victim(
    first: float | None, pid: int, at: float, expected: Phase
) -> None:
    assert landed(PHASES, first, at, pid) is expected


def test_table_counts_faults_by_phase_and_kind() -> None:
    counted = landing_table([MEET, MEET, Cell(Phase.MEET, Kind.NODE)])
    columns = {column.header: list(column.cells) for column in counted.columns}
    meet = columns['phase'].index(Phase.MEET)
    assert [columns[kind][meet] for kind in (Kind.KILL, Kind.NODE, Kind.STOP)] == ['2', '1', '']


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
