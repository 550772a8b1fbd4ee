# SPDX-License-Identifier: Apache-2.0
"""What `tools.chaos --elastic` draws, what it compares with, and when it says that it is wrong."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from moevement_ext.events import RecoveryStarted, WindowPersisted, encode
from tools.chaos.elastic import EVENTS, LAYOUTS, RUN_ID, ElasticCampaign, Life, draw_lives
from tools.lab.digests import StateDigest
from tools.lab.job import DIGEST
from tools.lab.programs import LabError

BEGAN = [None, 3, 3, None, 7]
EP2, EP3, EP4 = LAYOUTS[:3]
LIVES = [
    Life(EP4, 2, 3),
    Life(EP2, 1, 2),
    Life(EP3, 1, 2),
    Life(EP2, 1, in_reshard=True),
    Life(EP4, 2),
]


class FakeJobs:
    """Jobs that write what the campaign reads."""

    def __init__(self, memory: Path) -> None:
        self.memory = memory
        self.starts: list[Any] = []
        self.state = {'0': {'exp_avg/a': 'x', 'rng/data': 'x'}}
        self.plain = {'0': {'exp_avg/a': 'x', 'rng/data': 'y'}}
        self.leak = 0
        self.persisted = {3: 3, 7: 7}
        """Newest window by the iteration after which a life is killed."""

    def __call__(
        self, folder: Path, flags: Sequence[str], life: Life, kill_at: int | None = None,
        fail_at: str = '',
    ) -> int:  # fmt: skip
        start = SimpleNamespace(folder=folder, flags=flags, life=life, kill_at=kill_at)
        start.folder.mkdir(parents=True)
        self.starts.append(start)
        protected = '--sparse-ckpt' in start.flags
        digest = StateDigest('', 40, self.state if protected else self.plain)
        (start.folder / DIGEST).write_bytes(msgspec.json.encode(digest))
        if protected:
            self.write_events(start)
            for path in self.memory.iterdir():
                shutil.rmtree(path)
            number = int(start.folder.name.removeprefix('life'))
            if start.kill_at is not None or fail_at:
                left = self.memory / f'{RUN_ID}.{number}' / 'window'
                left.parent.mkdir()
                left.write_bytes(bytes(4096 * (1 + self.leak * number)))
        if fail_at:
            return 0
        return 40 if start.kill_at is None else start.kill_at

    def write_events(self, start: Any) -> None:
        events = start.folder / EVENTS
        events.mkdir()
        began = BEGAN[int(start.folder.name.removeprefix('life'))]
        lines = []
        if began is not None:
            lines.append(encode(RecoveryStarted(start=began, dense_at=began, source=''), 0, 1))
        if start.kill_at in self.persisted:
            lines.append(
                encode(WindowPersisted(start=self.persisted[start.kill_at], plan=''), 0, 1)
            )
        (events / 'rank0.jsonl').write_bytes(b''.join(lines))


@pytest.fixture
def jobs(tmp_path: Path) -> FakeJobs:
    memory = tmp_path / 'memory'
    memory.mkdir()
    return FakeJobs(memory)


def campaign(jobs: FakeJobs, tmp_path: Path) -> ElasticCampaign:
    return ElasticCampaign(tmp_path, tmp_path / 'text', jobs.memory, LIVES, jobs)


def value(start: Any, flag: str) -> str | None:
    return start.flags[start.flags.index(flag) + 1] if flag in start.flags else None


def test_plain_megatron_trains_in_the_same_layouts(jobs: FakeJobs, tmp_path: Path) -> None:
    """The second life has trained nothing that counts: the third begins where it began."""
    ran = campaign(jobs, tmp_path)
    assert len([*ran.live()]) == 5
    assert ran.different() == [], 'streams of random numbers may differ'
    plain = jobs.starts[5:]
    assert [start.life.layout for start in plain] == [EP4, EP3, EP4]
    assert [value(start, '--exit-interval') for start in plain] == ['3', '7', None]
    saved = [value(start, '--save') for start in plain]
    assert [value(start, '--load') for start in plain] == [None, *saved[:2]]


@pytest.mark.parametrize(('leak', 'wrong'), [(0, None), (3, 'life 1 left')])
def test_growing_tmpfs_is_detected(
    leak: int, wrong: str | None, jobs: FakeJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('tools.chaos.elastic._FIRST', 1)
    jobs.leak = leak
    ran = campaign(jobs, tmp_path)
    assert len([*ran.live()]) == 5
    assert (ran.growth() or '')[: len(wrong or '')] == (wrong or '')
    assert (ran.growth() is None) == (wrong is None)


def test_attempt_that_survives_its_fault_point_is_an_error(
    jobs: FakeJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f'{__name__}.BEGAN', [None, 3, 3, 7, 7])
    with pytest.raises(LabError, match='life3 was to be killed before'):
        list(campaign(jobs, tmp_path).live())


def test_attempt_that_resumes_before_a_persisted_window_is_an_error(
    jobs: FakeJobs, tmp_path: Path
) -> None:
    jobs.persisted[5] = 4
    with pytest.raises(LabError, match='life2 went on from 3, though all ranks had 4'):
        list(campaign(jobs, tmp_path).live())


def test_seed_draws_attempts_without_repeated_layouts() -> None:
    lives = draw_lives(1, 20)
    assert lives == draw_lives(1, 20) != draw_lives(2, 20)
    assert len(lives) == 21 and lives[-1].nodes == 2
    killed = lives[:-1]
    assert all(a.layout != b.layout for a, b in zip(killed, killed[1:], strict=False))
    assert {one.layout.ranks for one in killed} == {2, 3, 4}
    assert all(one.layout.ranks % one.nodes == 0 for one in lives)
