# SPDX-License-Identifier: Apache-2.0
"""What `tools.chaos --elastic` draws, and when it says that something is wrong."""

from pathlib import Path

import pytest

from moevement_ext.events import Event, RecoveryStarted, WindowPersisted, encode
from tools.chaos.elastic import EVENTS, LAYOUTS, ElasticCampaign, Life, Lived, draw_lives
from tools.lab.programs import LabError

KILLED = Life(LAYOUTS[2], 2, 3)
BEGAN = RecoveryStarted(start=3, dense_at=3, source='')


def test_seed_draws_attempts_without_repeated_layouts() -> None:
    lives = draw_lives(1, 20)
    assert lives == draw_lives(1, 20) != draw_lives(2, 20)
    assert len(lives) == 21 and lives[-1].nodes == 2
    killed = lives[:-1]
    assert all(a.layout != b.layout for a, b in zip(killed, killed[1:], strict=False))
    assert {one.layout.ranks for one in killed} == {2, 3, 4}
    assert all(one.layout.ranks % one.nodes == 0 for one in lives)


@pytest.mark.parametrize(
    ('second', 'persisted', 'wrong'),
    [
        (Life(LAYOUTS[0], 1), 3, None),
        (Life(LAYOUTS[0], 1), 4, 'life1 went on from 3, though all ranks had 4'),
        (Life(LAYOUTS[0], 1, in_reshard=True), 3, 'life1 was to be killed before'),
    ],
)
def test_attempt_that_resumes_elsewhere_is_an_error(
    second: Life, persisted: int, wrong: str | None, tmp_path: Path
) -> None:
    told: list[Event] = [WindowPersisted(start=persisted, plan=''), BEGAN]

    def run(folder: Path, *launched: object) -> int:
        (folder / EVENTS).mkdir(parents=True)
        line = encode(told[int(folder.name.removeprefix('life'))], 0, 1)
        (folder / EVENTS / 'rank0.jsonl').write_bytes(line)
        return 7

    campaign = ElasticCampaign(tmp_path, tmp_path, tmp_path, [KILLED, second], run)
    if wrong is None:
        assert [one.began for one in campaign.live()] == [0, 3]
        return
    with pytest.raises(LabError, match=wrong):
        list(campaign.live())


@pytest.mark.parametrize(
    ('nbytes', 'last', 'wrong'),
    [
        ([4, 8, 5, 4, 4, 16], 0, None),
        ([4, 8, 5, 4, 4, 17], 0, 'life 5 left 17 bytes'),
        ([4], 1, '1 layouts with 4 bytes are left at the end'),
    ],
)
def test_growing_tmpfs_is_detected(
    nbytes: list[int], last: int, wrong: str | None, tmp_path: Path
) -> None:
    lived = [*(Lived(KILLED, 0, 1, one) for one in nbytes), Lived(KILLED, 0, last, 4)]
    campaign = ElasticCampaign(tmp_path, tmp_path, tmp_path, [], lived=lived)
    assert (campaign.growth() or '')[: len(wrong or '')] == (wrong or '')
    assert (campaign.growth() is None) == (wrong is None)
