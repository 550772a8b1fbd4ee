# SPDX-License-Identifier: Apache-2.0
"""What a campaign compares its jobs with: a run that trains the same."""

from pathlib import Path

import pytest
from rich.console import Console

from tools.chaos import campaign as campaigns
from tools.chaos.__main__ import parse_arguments
from tools.chaos.campaign import Campaign
from tools.chaos.results import Results

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
