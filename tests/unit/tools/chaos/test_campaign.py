# SPDX-License-Identifier: Apache-2.0
"""What a campaign compares with, where its faults landed, and what it says in the end."""

import argparse
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moevement_ext.events import Event, FailureDetected, RecoveryPhase, WindowPersisted
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


def fault(tier: Tier, lost: int = 0, stall_s: float = 3.0, *cells: Cell) -> FaultRecord:
    return FaultRecord('kill rank 1', list(cells), 40, tier, 4, lost, 3.0, stall_s)


def done(number: int, *faults: FaultRecord, identical: bool = True, **fields: Any) -> JobDone:
    return JobDone(
        number, 0, 'pp2-ep2', list(faults), identical, **{'survivors_lost': [], **fields}
    )


class TestResults:
    def test_results_are_read_back(self, tmp_path: Path) -> None:
        path = tmp_path / NAME
        before = Results(path)
        before.add(Begun(['--faults', '9'], 7))
        before.add(Refused(2, 'pp4', 'ValueError'))
        before.add(done(1, fault(Tier.LOCALIZED, 0, 3.0, Cell(Phase.MEET, Kind.KILL))))
        after = Results(path)
        assert (after.begun.seed, after.jobs) == (7, before.jobs)
        assert (after.refusals(2), after.refusals(1)) == (1, 0)

    def test_lines_keep_their_field_names(self, tmp_path: Path) -> None:
        path = tmp_path / NAME
        Results(path).add(done(1, fault(Tier.DISK)))
        assert path.read_text() == (
            '{"type":"job","number":1,"configuration":0,"what":"pp2-ep2","struck":[{"fault":'
            '"kill rank 1","cells":[],"iteration":40,"tier":"disk","replayed":4,"lost":0,'
            '"seconds":3.0,"stall_s":3.0}],"identical":true,"survivors_lost":[],"failed":""}\n'
        )

    def test_summary_counts_faults_and_losses(self, tmp_path: Path) -> None:
        results = Results(tmp_path / NAME)
        results.add(done(1, fault(Tier.LOCALIZED), fault(Tier.LOCALIZED)))
        lost = {'survivors_lost': ['rank 2'], 'identical': False}
        results.add(done(2, fault(Tier.DISK, lost=7), **lost))
        assert results.summary() == (
            'chaos: faults=3 localized=2 whole_job=0 disk=1 lost_iterations=7 bit_identical=false '
            'survivors_lost=1'
        )

    @pytest.mark.parametrize(
        ('job', 'status'),
        [
            (done(1, fault(Tier.LOCALIZED)), 0),
            (done(1, fault(Tier.LOCALIZED, 1)), 1),
            (done(1, fault(Tier.LOCALIZED), identical=False), 1),
            (done(1, fault(Tier.LOCALIZED, stall_s=15.1)), 1),
            (done(1, fault(Tier.LOCALIZED), survivors_lost=['rank 2']), 1),
            (done(1, fault(Tier.LOCALIZED), failed='stands still'), 2),
            (done(1), 1),
        ],
    )
    def test_exit_status_follows_the_results(
        self, job: JobDone, status: int, tmp_path: Path
    ) -> None:
        results = Results(tmp_path / NAME)
        results.add(job)
        args = argparse.Namespace(max_stall=15.0, faults=1)
        assert verdict(args, results) == status


def phase(rank: int, name: str, time: float, pid: int | None = None) -> Event:
    return happened(RecoveryPhase, rank, time, pid, phase=name)


class TestLanding:
    FIRST = 100.0
    EVENTS = [
        *(phase(rank, 'over', 90.0) for rank in (0, 1)),
        happened(WindowPersisted, 0, 95.0),
        phase(0, 'detect', 100.1),
        happened(FailureDetected, 0, 100.2),
        phase(0, 'meet', 100.2),
        phase(2, 'respawn', 103.0, 99),
        phase(2, 'regroup', 103.1, 99),
        phase(2, 'fetch', 103.2, 99),
    ]

    @pytest.mark.parametrize(
        ('pid', 'at', 'expected'),
        [
            (10, 100.5, Phase.MEET),
            (99, 103.3, Phase.FETCH),
            (11, 100.05, Phase.UNNOTICED),
            (11, 100.15, Phase.DETECT),
            (12, 101.0, Phase.MEET),
        ],
        ids=[
            'survivor',
            'replacement',
            'nobody noticed',
            'others noticed',
            'new and still importing',
        ],
    )
    def test_second_fault_lands_in_the_phase_of_its_victim(
        self, pid: int, at: float, expected: Phase
    ) -> None:
        assert landed(self.EVENTS, self.FIRST, at, pid) is expected

    def test_first_fault_lands_in_training(self) -> None:
        assert landed(self.EVENTS[:3], None, 99.0, 10) is Phase.TRAINING
        assert landed([], None, 99.0, 10) is Phase.TRAINING


def test_table_counts_faults_by_phase_and_kind() -> None:
    cells = [Cell(Phase.MEET, Kind.KILL), Cell(Phase.MEET, Kind.NODE)]
    counted = landing_table([*cells, cells[0]])
    columns = {column.header: list(column.cells) for column in counted.columns}
    meet = columns['phase'].index(Phase.MEET)
    assert [columns[kind][meet] for kind in (Kind.KILL, Kind.NODE, Kind.STOP)] == ['2', '1', '']


PLAINEST = ['--faults', '24', '--seed', '90210']
JOBS = range(1, 13)


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    results = Results(tmp_path / 'campaign.jsonl')
    return Campaign(tmp_path, Path(), parse_arguments(PLAINEST), results, Console(quiet=True))


def trained(campaign: Campaign, job: int) -> list[str]:
    configuration = campaign.draw(job, 0, 0)
    return configuration.training_flags(Path(), campaign._iterations(configuration), Path())


def test_jobs_with_drawn_windows_share_one_reference(campaign: Campaign) -> None:
    assert len({tuple(trained(campaign, job)) for job in JOBS}) == 1


def test_reference_of_other_flags_is_not_reused(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a configuration that was drawn again."""
    folders = []

    def no_job(launch: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(campaigns, 'train', no_job)
    monkeypatch.setattr(Campaign, '_anew', lambda self, name: folders.append(name))
    configuration = campaign.draw(1, 0, 0)
    for length in (72, 72, 74):
        monkeypatch.setattr(Campaign, '_iterations', lambda self, _, length=length: length)
        with pytest.raises(InterruptedError):
            campaign._plain(0, 0, configuration)
    assert folders[0] == folders[1] != folders[2]
