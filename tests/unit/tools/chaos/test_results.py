# SPDX-License-Identifier: Apache-2.0
"""What a campaign keeps, its last line and its exit status; and its flags."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from tools.chaos.__main__ import _clear, lock, main, parse_arguments, verdict
from tools.chaos.results import (
    NAME,
    Begun,
    Cell,
    FaultRecord,
    JobDone,
    Phase,
    Refused,
    ResultError,
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
    def test_interrupted_campaign_is_continued(self, tmp_path: Path) -> None:
        path = tmp_path / NAME
        before = Results(path)
        before.add(Begun(['--faults', '9'], 7))
        before.add(Refused(2, 'pp4', 'ValueError'))
        hit = Cell(Phase.MEET, Kind.KILL)
        before.add(done(1, fault(Tier.LOCALIZED, 0, 3.0, hit)))
        with path.open('ab') as file:
            file.write(b'{"type":"job","number":2,"conf')  # power was lost
        after = Results(path)
        assert after.begun() == Begun(['--faults', '9'], 7)
        assert (after.jobs, after.refusals(2), after.refusals(1)) == (before.jobs, 1, 0)
        assert after.faults[0].cells == [hit]
        after.add(done(2))
        assert [job.number for job in Results(path).jobs] == [1, 2]

    def test_lines_keep_their_field_names(self, tmp_path: Path) -> None:
        path = tmp_path / NAME
        Results(path).add(done(1, fault(Tier.DISK)))
        assert path.read_text() == (
            '{"type":"job","number":1,"configuration":0,"what":"pp2-ep2","struck":[{"fault":'
            '"kill rank 1","cells":[],"iteration":40,"tier":"disk","replayed":4,"lost":0,'
            '"seconds":3.0,"stall_s":3.0}],"identical":true,"survivors_lost":[],"failed":""}\n'
        )

    def test_campaign_resumes_with_the_same_arguments_and_seed(self, tmp_path: Path) -> None:
        arguments = '--faults 9 --configurations 3 --kinds kill'.split()
        Results(tmp_path / NAME).add(Begun(arguments, 7))
        args = parse_arguments(['--resume', str(tmp_path)])
        assert (args.faults, args.configurations, args.seed, args.output) == (9, 3, 7, tmp_path)
        assert args.kinds == [Kind.KILL]

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


def test_folder_of_other_things_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / 'job1').mkdir()
    for _ in range(2):
        with pytest.raises(ResultError, match=f'--output {tmp_path}: has files'):
            lock(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ['job1']


def test_two_campaigns_do_not_share_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lock(tmp_path):
        assert main(['--output', str(tmp_path)]) == 2
    assert 'another campaign is under way there' in capsys.readouterr().out.replace('\n', '')
    lock(tmp_path).close()


def test_only_folders_of_campaigns_are_cleared(tmp_path: Path) -> None:
    for name in ('job1', 'job1-disk', 'life0', 'plain0', 'plain0-1-ab', 'jobs', 'plain-text'):
        (tmp_path / name).mkdir()
    _clear(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {'jobs', 'plain-text'}
