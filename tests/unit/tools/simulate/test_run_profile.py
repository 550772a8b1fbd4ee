# SPDX-License-Identifier: Apache-2.0
"""From the events of a run to what the simulator says of it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from moevement_ext.events import Protected, Replanned, WindowCommitted
from tests.unit.tools.runs import EXPOSED_S, localized_run, write
from tests.unit.tools.samples import event
from tools.plan.description import DescriptionError, read
from tools.simulate import __main__ as simulate
from tools.simulate.profile import OperatorProfile, Profile
from tools.simulate.run_profile import derive
from tools.simulate.runs import Pipeline

MTBF_S = 24.0
"""Of the sample run: one failure in so many seconds."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path / 'events', localized_run())


def changed(kind: type[Any], **fields: Any) -> list[Any]:
    """The sample run with other fields in the events of a kind."""
    return [
        event(kind, one.rank, one.time, pid=one.pid, iteration=one.iteration,
              **{**one.own_fields(), **fields}) if isinstance(one, kind) else one
        for one in localized_run()
    ]  # fmt: skip


def test_events_give_the_profile(run: Path) -> None:
    found = derive(run, {})
    assert found.iteration_s == pytest.approx(1 - EXPOSED_S)
    assert (found.copy_bytes_per_s, found.network_bytes_per_s) == (1e9, 1e8)
    assert found.disk_bytes_per_s is None
    assert (found.replicas, found.mtbf_s) == (1, MTBF_S)
    assert found.restart_s == pytest.approx(4.5 - 2)  # without convert and catch_up
    assert found.pipeline == Pipeline(nodes=4, stages=2)
    assert found.operators == (
        OperatorProfile('layer1.router', 12, 2),
        OperatorProfile('layer1.expert0', 240, 40, 1.0),
        OperatorProfile('layer1.expert1', 240, 40, 1.0),
    )


def test_popularity_is_used_once_measured(tmp_path: Path) -> None:
    shares = {'layer1.expert0': 0.75}
    plans = [
        event(Replanned, rank, 5.0, pid=10 + rank, origin=8, window=2, version=1, shares=shares)
        for rank in range(4)
    ]
    events = sorted([*localized_run(), *plans], key=lambda one: one.time)
    found = derive(write(tmp_path, events), {})
    assert [one.tokens for one in found.operators] == [None, 0.75, 0.0]


def test_profile_has_the_largest_rank_and_the_slowest_rates(tmp_path: Path) -> None:
    events = [
        event(Protected, 1, one.time, pid=one.pid,
              **{**one.own_fields(), 'operators': {'embedding': (999, 99)}, 'experts': []})
        if isinstance(one, Protected) and one.rank == 1 else one
        for one in changed(WindowCommitted, copy_bytes_per_s=5e8)
    ]  # fmt: skip
    found = derive(write(tmp_path, events), {})
    assert found.operators == (OperatorProfile('embedding', 999, 99),)
    assert found.copy_bytes_per_s == 5e8


def test_copies_on_the_same_node_do_not_count(tmp_path: Path) -> None:
    """Two stages on one node, each on two of its ranks: a lost node takes both copies."""
    found = derive(write(tmp_path, changed(Protected, copies=2, node='node0')), {})
    assert found.pipeline == Pipeline(nodes=1, stages=2)


def test_copies_on_other_nodes_count(tmp_path: Path) -> None:
    found = derive(write(tmp_path, changed(Protected, copies=2)), {})
    assert found.pipeline == Pipeline(nodes=4, stages=2, copies=2)


def test_launch_gives_the_restart_without_a_failure(tmp_path: Path) -> None:
    found = derive(write(tmp_path, [one for one in localized_run() if one.time < 10.2]), {})
    assert (found.restart_s, found.mtbf_s) == (2.0, None)
    assert 'nothing failed' in found.source


@pytest.mark.parametrize(
    ('events', 'message'),
    [
        ([], 'there are no events'),
        ([one for one in localized_run() if one.time < 5], 'give the events of a longer run'),
        (changed(WindowCommitted, send_bytes_per_s=None), 'give --network-bandwidth'),
    ],
    ids=['none', 'too few', 'no replicas'],
)
def test_what_is_missing_is_named(events: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match=message):
        derive(write(tmp_path, events), {})


def test_file_has_the_same_profile(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = run / 'profiles' / 'run.json'
    argv = ['profile', str(run), '-o', str(target), '--disk-bandwidth', '2']
    assert simulate.main(argv) == 0
    assert '3 operators, 0.9 s per iteration, a failure every 24 s' in capsys.readouterr().out
    found = read(target, Profile)
    assert isinstance(found, Profile)
    assert (found.disk_bytes_per_s, found.mtbf_s, found.pipeline.stages) == (2e9, MTBF_S, 2)
    assert simulate.main(['profile', str(run / 'nothing'), '-o', str(target)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.match('simulate profile: .*nothing: .*--sparse-ckpt-events', line)


class TestOneCommand:
    def answer(self, capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
        flags = ['--system', 'ours', '--json', '--hours', '1', *argv]
        assert simulate.main(flags) == 0
        return json.loads(capsys.readouterr().out)

    def test_half_the_time_between_failures_lowers_the_ettr(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        as_it_was = self.answer(capsys, '--profile', str(run))
        worse = self.answer(capsys, '--profile', str(run), '--mtbf', '0.5x')
        assert (as_it_was['mtbf_s'], worse['mtbf_s']) == (MTBF_S, MTBF_S / 2)
        assert worse['ettr_exact'] < as_it_was['ettr_exact'] < 1
        assert self.answer(capsys, '--profile', str(run), '--mtbf', '60')['mtbf_s'] == 60

    def test_localized_recovery_is_shorter(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        plain = self.answer(capsys, '--profile', str(run))
        local = self.answer(
            capsys, '--profile', str(run), '--recovery', 'localized', '--micro-batches', '4'
        )
        assert local['expected_recovery_s'] < plain['expected_recovery_s']

    @pytest.mark.parametrize(
        ('flags', 'message'),
        [
            (['--recovery', 'localized'], '--micro-batches is missing; the events'),
            (['--system', 'checkfreq'], '--disk-bandwidth is missing'),
        ],
    )
    def test_figures_missing_in_events_are_requested(
        self, flags: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            simulate.main(['--system', 'ours', '--profile', str(run), *flags])
        assert message in capsys.readouterr().err

    def test_a_multiple_without_a_measured_mtbf_is_refused(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        calm = write(tmp_path, [one for one in localized_run() if one.time < 10.2])
        with pytest.raises(SystemExit):
            simulate.main(['--system', 'ours', '--profile', str(calm), '--mtbf', '2x'])
        assert '--mtbf is a multiple, but there is no profile of a run that failed' in (
            capsys.readouterr().err
        )
