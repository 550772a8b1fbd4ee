# SPDX-License-Identifier: Apache-2.0
"""What a campaign keeps, its last line and its exit status."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from tools.chaos.__main__ import verdict
from tools.chaos.results import (
    NAME,
    Begun,
    Cell,
    FaultRecord,
    JobDone,
    Phase,
    Refused,
    Results,
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
