# SPDX-License-Identifier: Apache-2.0
"""One rank says for all how an outage came out, with what launcher and watchdogs have seen."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, Store, TCPStore

from moevement_ext.launch.launcher_events import JobRecovered
from moevement_ext.membership import mailbox
from moevement_ext.membership.mailbox import of_launch
from moevement_ext.membership.report import Report
from moevement_ext.memory.node_store import Death, forget_deaths, noted_deaths
from moevement_ext.memory.window.name import Window, WindowName
from moevement_ext.recover.outage import End, Outage, Summary, deaths, of_the_whole_job
from moevement_ext.recover.verdict import Localized
from moevement_ext.recover.verification import Verified


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv('TORCHELASTIC_USE_AGENT_STORE', 'True')
    monkeypatch.setenv('MASTER_ADDR', '127.0.0.1')
    monkeypatch.setenv('MASTER_PORT', str(store.port))
    monkeypatch.setenv('TORCHELASTIC_RESTART_COUNT', '1')
    monkeypatch.setenv('MOEVEMENT_LAUNCH', 'this')
    yield of_launch(store, 'this')


def report(process: int, survivor: bool = True, node: str = 'n0') -> Report:
    return Report(survivor=survivor, node=node, process=process, windows=[])


WINDOW = Window(WindowName(3, 'plan'), 3)
LOST_STAGE = Localized(
    target=8,
    stages=frozenset({1}),
    ranks=frozenset({1, 2}),
    replacements=frozenset({2}),
    window=WINDOW,
)


def recover(launcher: Store, rank: int, verdict: Localized = LOST_STAGE) -> Outage:
    """Ranks 1 and 2 are a stage, of which process 12 dies; a failure in the recovery, too.

    As in a restarted container, its successor has the same node, and perhaps the same id.
    """
    store = PrefixStore('round/7', launcher)
    outage = Outage(rank)
    outage.begins('rank 2 is gone', 1.5, [report(10), report(11), report(12)])
    now = [report(10), report(11), report(22, survivor=False)]
    outage.met(now)
    outage.begins('the network', 0.0, now)
    outage.met(now)
    with outage.replay():
        for other in verdict.ranks:
            Outage(other).publish_verified(store, Verified(4 + other, 7, ()))
    outage.is_over(store, verdict, now, {'starting processes': 1.2})
    return outage


def test_first_survivor_reports_once(launcher: Store, capsys: pytest.CaptureFixture[str]) -> None:
    mailbox.write_death(launcher, 12, 2, 'was killed by SIGKILL')
    outages = [recover(launcher, rank) for rank in range(3)]
    assert capsys.readouterr().out == ''  # no rank reports before all have recovered
    for outage in outages * 2:
        outage.say()
    (line,) = capsys.readouterr().out.splitlines()
    died = time.strftime('%H:%M')
    assert f'| RECOVERED at iteration 8 | rank 2 on n0 was killed by SIGKILL at {died}' in line
    assert ' | lost iterations: 0 | computed again: 5 | away: ' in line
    away = re.search(r'away: ([\d.]+) s \(starting processes 1\.2, .*the rest ', line)
    assert away is not None and float(away[1]) >= 1.5
    assert 'window 3 and the logs on stage 1, their own state on the others' in line
    assert '| verified: 11 operators at iteration 7, differing: 0 |' in line
    assert mailbox.read_recovery(launcher) == line


def test_a_lost_store_does_not_end_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv('TORCHELASTIC_USE_AGENT_STORE', 'True')
    monkeypatch.setenv('MASTER_ADDR', 'no.such.host.invalid')
    monkeypatch.setenv('MASTER_PORT', 'none')
    of_the_whole_job(None, lambda *_: pytest.fail('it knows nothing'))
    assert capsys.readouterr().out == ''


def whole_job(first: Death | None, capsys: pytest.CaptureFixture[str]) -> str:
    def make(cause: str, since: float | None) -> Summary:
        away = None if since is None else time.time() - since
        return Summary(8, cause, 0, 5, away, {}, 'window 3', Verified(0, -1, ()))

    of_the_whole_job(first, make)
    return capsys.readouterr().out


def test_launcher_learns_the_cause(launcher: Store, capsys: pytest.CaptureFixture[str]) -> None:
    mailbox.write_cause(launcher, 1, 3, '(pid 77) was killed by SIGKILL')
    out = whole_job(Death(time.time(), 0, 5), capsys)
    assert '| rank 3 (pid 77) was killed by SIGKILL at ' in out and ' s | goes on' in out


@pytest.mark.parametrize(
    ('ago_s', 'away'),
    [
        (60, 'away: 6'),
        (-0.5, 'away: 0.0 s'),  # a clock that is a little ahead
        (-7200, 'away: since a time that nothing here has seen'),
    ],
)
def test_else_the_process_that_ended_first_is_named(
    ago_s: float, away: str, launcher: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    out = whole_job(Death(time.time() - ago_s, 1, 5599), capsys)
    assert '| rank 1 (pid 5599) was the first to end' in out and f'| {away}' in out


def test_the_reason_of_another_start_is_not_believed(
    launcher: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mailbox.write_cause(launcher, 2, 3, '(pid 77) was killed by SIGKILL')
    assert '| the job was launched again | ' in whole_job(None, capsys)
    mailbox.write_cause(of_launch(launcher, 'the one before'), 1, 3, 'was killed by SIGKILL')
    assert '| the job was launched again | ' in whole_job(None, capsys)


def test_newest_death_of_each_rank_is_read(tmp_path: Path) -> None:
    assert noted_deaths(tmp_path) == []
    lines = ['{"time": 2.0, "rank": 1, "pid": 5}', '{"time": 9.0, "rank": 0, "pid": 4}']
    lines += ['{"time": 8.5, "rank": 1, "pid": 6}', 'nonsense', '{"time": 1']
    (tmp_path / 'deaths.jsonl').write_text('\n'.join(lines))
    assert min(noted_deaths(tmp_path)) == Death(8.5, 1, 6)
    forget_deaths(tmp_path)
    assert os.listdir(tmp_path) == []
    forget_deaths(tmp_path)


# The line

NOW = time.mktime((2026, 1, 31, 4, 32, 52, 0, 0, -1))
SECONDS = {'noticing it': 0.12, 'starting processes': 7.9, 'connecting': 0.0}


def summary(**changed: object) -> Summary:
    values = {
        'iteration': 37,
        'cause': deaths([End(1, 'was killed by SIGKILL', NOW - 11.2, 'node1')]),
        'lost': 0,
        'replayed': 6,
        'away_s': 11.2,
        'seconds': SECONDS,
        'source': 'window 31',
        'verified': Verified(13, 36, ()),
    }
    return Summary(**(values | changed))  # type: ignore[arg-type]


def test_one_line_answers_an_operators_questions() -> None:
    assert summary().line(NOW) == (
        ' sparse ckpt | 2026-01-31 04:32:52 | RECOVERED at iteration 37 | rank 1 on node1 was '
        'killed by SIGKILL at 04:32:40 | lost iterations: 0 | computed again: 6 | away: 11.2 s '
        '(noticing it 0.1, starting processes 7.9, the rest 3.2) | goes on from: window 31 | '
        'verified: 13 operators at iteration 36, differing: 0 |'
    )


@pytest.mark.parametrize(
    ('changed', 'exact'),
    [
        *(({'verified': one}, True) for one in (Verified(13, 36, ()), Verified(0, -1, ()), None)),
        *(({'lost': lost}, False) for lost in (3, None)),
        ({'verified': Verified(1, 36, ('experts.0 from iteration 36',))}, False),
    ],
)
def test_launcher_colours_the_same_lines_as_a_worker(changed: dict, exact: bool) -> None:
    found = summary(**changed)
    assert found.is_exact is exact
    assert JobRecovered(found.line(NOW), '1 hot').nothing_lost is exact


def test_ranks_that_died_together_are_listed_together() -> None:
    killed = [End(rank, 'was killed by SIGKILL', 1.0 + rank, 'n2') for rank in (8, 9, 10, 12)]
    said = deaths([*killed, End(3, node='n1')])
    first = time.strftime('%H:%M:%S', time.localtime(9.0))
    assert said == f'rank 3 on n1 died, ranks 8-10, 12 on n2 were killed by SIGKILL at {first}'
    many = deaths([End(rank, 'was lost', node=f'n{rank}') for rank in range(100)])
    assert many.endswith(' and 96 more') and many.count(' was lost') == 4
