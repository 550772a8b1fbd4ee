# SPDX-License-Identifier: Apache-2.0
"""Chaos: what a seed draws, and what is read out of the events and the log of a struck job."""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tools.chaos.__main__ import parse_arguments, verdict
from tools.chaos.aiming import Aim
from tools.chaos.configuration import AUTO, Configuration, Feature, Precision, draw_configuration
from tools.chaos.evidence import Recovery, Tier, lost_iterations, persisted, recovery
from tools.chaos.flags import parse_layout
from tools.chaos.landing import ALL, RECOVERY, Cell, Coverage, Phase, landed, parse_cells
from tools.chaos.launching import Launcher
from tools.chaos.plan import Kind, draw_faults, draw_window
from tools.chaos.results import NAME, Begun, JobDone, Refused, ResultError, Results, Struck
from tools.demo.evidence import read_events
from tools.plot_run import Iteration

KINDS = list(Kind)
STRUCK = 100.0


def logged(*pairs: tuple[int, float]) -> list[Iteration]:
    """Iterations of pairs of number and seconds."""
    return [Iteration(time, number, 200.0, 5.0) for number, time in pairs]


def event(rank: int, name: str, time: float, pid: int | None = None, **fields: Any) -> dict:
    found = {'event': name, 'rank': rank, 'time': time, 'iteration': 0, **fields}
    return {'pid': 10 + rank if pid is None else pid, **found}


def localized(rank: int, time: float, pid: int | None = None, replayed: int = 0) -> dict:
    fields = {'scope': 'localized', 'target': 40, 'replayed': replayed}
    return event(rank, 'recovered', time, pid, **fields)


def found(events: Sequence[dict], pids: Sequence[int], *pairs: tuple[int, float]) -> Any:
    return recovery(sorted(events, key=lambda item: item['time']), pids, STRUCK, logged(*pairs))


def struck(tier: Tier, lost: int = 0, stall_s: float = 3.0, *cells: Cell) -> Struck:
    return Struck('kill rank 1', list(cells), 40, tier, 4, lost, 3.0, stall_s)


def done(number: int, *faults: Struck, identical: bool = True, **fields: Any) -> JobDone:
    return JobDone(
        number, 0, 'pp2-ep2', list(faults), identical, **{'survivors_lost': [], **fields}
    )


class TestPlan:
    def test_a_seed_stands_for_the_same_faults(self) -> None:
        assert draw_faults(7, 30, KINDS, 2, 2) == draw_faults(7, 30, KINDS, 2, 2)
        assert draw_faults(7, 30, KINDS, 2, 2) != draw_faults(8, 30, KINDS, 2, 2)

    @pytest.mark.parametrize('kinds', [KINDS, [Kind.KILL], [Kind.NODE]])
    def test_no_two_faults_are_alike(self, kinds: list[Kind]) -> None:
        faults = draw_faults(3, 60, kinds, 2, 1)
        assert len({(fault.kind, fault.victims, fault.after) for fault in faults}) == 60
        assert {fault.kind for fault in faults} == set(kinds)

    def test_fifteen_faults_have_all_kinds(self) -> None:
        assert {fault.kind for fault in draw_faults(1, 15, KINDS, 4, 1)} == set(Kind)

    def test_jobs_have_different_faults(self) -> None:
        assert draw_faults(7, 30, KINDS, 2, 2, job=1) != draw_faults(7, 30, KINDS, 2, 2, job=2)

    def test_a_second_strike_follows_the_loss_of_one_worker(self) -> None:
        faults = draw_faults(7, 100, KINDS, 2, 2, aimed=0.5)
        aimed = [fault for fault in faults if fault.aimed]
        assert 30 < len(aimed) < 70
        for fault in aimed:
            assert (fault.kind, len(fault.victims), fault.apart_s) == (Kind.KILL, 1, 0)

    def test_victims(self) -> None:
        for fault in draw_faults(5, 200, KINDS, 2, 2):
            match fault.kind:
                case Kind.NODE:
                    assert fault.victims in ((0, 1), (2, 3)) and not fault.apart_s
                case Kind.DOUBLE:
                    assert len(fault.victims) == 2
                    assert fault.apart_s or fault.victims[0] != fault.victims[1]
                case Kind.WHOLE | Kind.JOB:
                    assert fault.victims == (0, 1, 2, 3)
                case Kind.AGENT:
                    assert len(fault.victims) == 1 and fault.victims[0] > 0
                case _:
                    assert len(fault.victims) == 1 and not fault.apart_s
            assert set(fault.victims) <= set(range(4))
            assert fault.after >= 0 and 0.0 <= fault.phase <= 2.0

    def test_some_strike_at_once_and_some_double_the_same_rank(self) -> None:
        faults = draw_faults(5, 400, KINDS, 2, 2)
        assert any(fault.after == 0 for fault in faults)
        doubles = [fault for fault in faults if fault.kind is Kind.DOUBLE]
        assert any(fault.victims[0] == fault.victims[1] for fault in doubles)
        assert any(not fault.apart_s for fault in doubles)

    def test_windows_of_consecutive_jobs_differ(self) -> None:
        windows = [draw_window(11, job, 6) for job in range(6)]
        assert sorted(windows) == [1, 2, 3, 4, 5, 6]


class TestRecovery:
    SURVIVORS = [localized(0, 102.0), event(1, 'failure_detected', 100.2), localized(1, 102.1)]
    NEWCOMER = [event(2, 'worker_started', 100.5, 99), localized(2, 102.2, 99, replayed=4)]

    def test_localized(self) -> None:
        back = found([*self.SURVIVORS, *self.NEWCOMER], [10, 11, 99], (40, 99.9))
        assert back == Recovery(Tier.LOCALIZED, 102.2, 40, 4, 1)

    def test_not_back_while_a_rank_is_missing(self) -> None:
        assert found(self.SURVIVORS, [10, 11, 99], (40, 99.9)) is None

    def test_what_an_earlier_process_reported_does_not_count(self) -> None:
        assert found([*self.SURVIVORS, *self.NEWCOMER], [10, 11, 98], (40, 99.9)) is None

    def test_an_earlier_recovery_does_not_count(self) -> None:
        earlier = [localized(rank, 99.0) for rank in range(3)]
        assert found(earlier, [10, 11, 12], (40, 99.9), (41, 100.1)) is None

    def test_a_failure_after_the_recovery_counts(self) -> None:
        later = event(0, 'failure_detected', 103.0)
        assert found([*self.SURVIVORS, *self.NEWCOMER, later], [10, 11, 99], (41, 102.9)) is None

    def test_whole_job(self) -> None:
        tier = {'reason': 'no log', 'tier': 'the whole job'}
        events = [event(0, 'next_tier', 100.5, **tier)]
        for rank in range(2):
            events.append(event(rank, 'worker_started', 101.0, 50 + rank))
            events.append(event(rank, 'recovery_started', 102.0, 50 + rank, start=36))
            events.append(event(rank, 'recovered', 103.0 + rank, 50 + rank, replayed=4))
        back = found(events, [50, 51], (40, 99.0))
        assert back == Recovery(Tier.WHOLE_JOB, 104.0, 40, 4, 2)

    def test_localized_after_the_whole_job_was_started_again_is_whole_job(self) -> None:
        tier = event(0, 'next_tier', 100.5, reason='', tier='the whole job')
        back = found([*self.SURVIVORS, *self.NEWCOMER, tier], [10, 11, 99], (40, 99.9))
        assert back.tier is Tier.WHOLE_JOB

    def test_from_the_start(self) -> None:
        events = [event(rank, 'worker_started', 101.0, 50 + rank) for rank in range(2)]
        assert found(events, [50, 51], (40, 99.0)) is None
        back = found(events, [50, 51], (40, 99.0), (1, 103.0), (2, 103.5))
        assert back == Recovery(Tier.DISK, 103.0, 0, 0, 2)

    def test_a_survivor_that_logs_before_it_notices_is_not_back(self) -> None:
        events = [event(1, 'worker_started', 100.4, 51), event(0, 'failure_detected', 100.3)]
        assert found(events, [10, 51], (40, 99.0), (41, 100.5)) is None


class TestLostIterations:
    def test_back_at_the_newest_is_no_loss(self) -> None:
        back = Recovery(Tier.LOCALIZED, 102.0, 40, 4, 1)
        assert lost_iterations(back, logged((39, 99.0), (40, 99.9), (41, 102.5))) == 0

    def test_trained_again(self) -> None:
        back = Recovery(Tier.DISK, 103.0, 0, 0, 4)
        assert lost_iterations(back, logged((39, 99.0), (40, 99.9), (1, 103.0))) == 40

    def test_logged_between_strike_and_recovery(self) -> None:
        back = Recovery(Tier.WHOLE_JOB, 103.0, 40, 4, 4)
        assert lost_iterations(back, logged((40, 99.0), (41, 100.1), (42, 104.0))) == 1


def test_persisted_on_all_ranks() -> None:
    events = [event(0, 'window_persisted', 101.0), event(1, 'window_persisted', 99.0)]
    assert not persisted(events, [10, 11], 100.0)
    assert persisted([*events, event(1, 'window_persisted', 101.0)], [10, 11], 100.0)
    assert not persisted([], [], 100.0)


@pytest.mark.parametrize(
    ('text', 'ranks', 'flag'),
    [
        ('pp2-ep2', 4, '--expert-model-parallel-size 2'),
        ('pp4', 4, '--pipeline-model-parallel-size 4'),
        ('pp2-dp2', 4, '--expert-model-parallel-size 1'),
        ('pp2-vp2', 2, '--num-layers-per-virtual-pipeline-stage 1'),
        ('pp2-tp2', 4, '--tensor-model-parallel-size 2 --sequence-parallel'),
        ('pp3', 3, '--num-layers 6'),
    ],
)
def test_layout(text: str, ranks: int, flag: str) -> None:
    layout = parse_layout(text)
    assert layout.ranks == ranks
    assert flag in ' '.join(layout.flags())


class TestConfiguration:
    def drawn(self, seed: int) -> list[Configuration]:
        return [draw_configuration(seed, number) for number in range(20)]

    def test_a_seed_stands_for_the_same_configurations(self) -> None:
        assert self.drawn(3) == self.drawn(3) != self.drawn(4)

    @pytest.mark.parametrize('seed', range(20))
    def test_twenty_have_everything(self, seed: int) -> None:
        drawn = self.drawn(seed)
        assert {feature for one in drawn for feature in one.features} == set(Feature)
        assert {one.precision for one in drawn} == set(Precision)
        assert {one.launcher for one in drawn} == set(Launcher)
        assert {one.window for one in drawn} == {1, 2, 3, 4, 5, 6, AUTO}
        layouts = {one.layout.name for one in drawn}
        assert layouts >= {'pp2-ep2', 'pp4', 'pp2-dp2', 'pp2-ep2-vp2', 'pp2-tp2', 'pp3', 'ep2'}

    @pytest.mark.parametrize('seed', range(20))
    def test_only_what_goes_together(self, seed: int) -> None:
        for one in self.drawn(seed):
            assert not {Feature.SAVE, Feature.ASYNC_SAVE} <= set(one.features)
            assert one.nodes * one.workers_per_node == one.layout.ranks
            assert 1 <= one.replicas < one.nodes
            if one.layout.dp > one.layout.ep:
                assert one.precision is not Precision.BF16, 'its ranks are no twins'
            if one.launcher is Launcher.TORCHRUN:
                assert one.workers_per_node == 1 and one.spares == 0
                assert not {Kind.STOP, Kind.STUCK} & set(one.kinds())
            else:
                assert Kind.AGENT not in one.kinds()

    def test_another_attempt_is_another_configuration(self) -> None:
        assert draw_configuration(1, 0, attempt=1) != draw_configuration(1, 0)

    def test_flags_are_those_of_the_features(self) -> None:
        one = Configuration(parse_layout('pp2-ep2'), Precision.FP32, (), 3, 4)
        plain = ' '.join(one.training_flags(Path('text'), 50, Path('run')))
        assert '--bf16' not in plain and '--hidden-dropout 0 ' in plain
        assert '--untie-embeddings-and-output-weights' in plain
        assert '--train-iters 50' in plain and '--sparse-ckpt ' not in plain
        one = one._replace(features=tuple(Feature), precision=Precision.FP16)
        full = ' '.join(one.training_flags(Path('text'), 50, Path('run')))
        assert '--train-samples 360' in full and '--train-iters' not in full
        assert '--untie' not in full and '--save run/dense' in full and '--fp16' in full

    def test_plan_of_auto_is_restless(self) -> None:
        one = Configuration(parse_layout('pp2-ep2'), Precision.BF16, (), AUTO, 4)
        assert '--sparse-ckpt-reorder-change' in one.sparse_flags(Path('m'), Path('e'))


def phase(rank: int, name: str, time: float, pid: int | None = None) -> dict:
    return event(rank, 'recovery_phase', time, pid, phase=name)


class TestLanding:
    FIRST = 100.0
    EVENTS = [
        *(phase(rank, 'over', 90.0) for rank in (0, 1)),
        event(0, 'window_persisted', 95.0),
        phase(0, 'detect', 100.1),
        event(0, 'failure_detected', 100.2),
        phase(0, 'meet', 100.2),
        phase(2, 'respawn', 103.0, 99),
        phase(2, 'regroup', 103.1, 99),
        phase(2, 'fetch', 103.2, 99),
    ]

    @pytest.mark.parametrize(
        ('pid', 'struck', 'expected'),
        [
            (10, 100.5, Phase.MEET),
            (99, 103.3, Phase.FETCH),
            (11, 100.05, Phase.UNNOTICED),
            (11, 100.15, Phase.DETECT),
            (12, 101.0, Phase.MEET),
        ],
        ids=['survivor', 'newcomer', 'nobody noticed', 'others noticed', 'new and still importing'],
    )
    def test_second_strike(self, pid: int, struck: float, expected: Phase) -> None:
        assert landed(self.EVENTS, self.FIRST, struck, pid) is expected

    def test_what_the_victim_itself_named_last_counts_however_late(self) -> None:
        events = [*self.EVENTS, phase(2, 'convert', 103.31, 99)]
        assert landed(events, self.FIRST, 103.3, 99) is Phase.CONVERT

    def test_first_strike_lands_in_training(self) -> None:
        assert landed(self.EVENTS[:3], None, 99.0, 10) is Phase.TRAINING
        assert landed([], None, 99.0, 10) is Phase.TRAINING

    def test_first_strike_right_after_a_recovery(self) -> None:
        events = [phase(0, 'first-iteration', 98.0)]
        assert landed(events, None, 98.1, 10) is Phase.FIRST_ITERATION

    def test_second_strike_after_the_recovery_is_over(self) -> None:
        events = [*self.EVENTS, phase(0, 'over', 105.0)]
        assert landed(events, self.FIRST, 106.0, 10) is Phase.TRAINING


class TestCoverage:
    def test_cells_of_a_text(self) -> None:
        assert parse_cells('meet,fetch:kill') == [
            Cell(Phase.MEET, Kind.KILL),
            Cell(Phase.FETCH, Kind.KILL),
        ]
        assert len(parse_cells(f'{ALL}:kill,node')) == 2 * len(RECOVERY) == 18

    @pytest.mark.parametrize('text', ['meet', 'training:kill', 'meet:burn', ':'])
    def test_wrong_cells(self, text: str) -> None:
        with pytest.raises(ValueError, match='must be'):
            parse_cells(text)

    def test_empty_cells_are_aimed_at_in_turn_until_they_are_hit(self) -> None:
        cells = parse_cells('meet,fetch:kill,node')
        coverage = Coverage(cells)
        assert coverage.empty() == cells
        assert {coverage.aim([Kind.KILL, Kind.NODE]) for _ in cells} == set(cells)
        coverage.add([cell for cell in cells if cell.kind is Kind.NODE])
        assert {coverage.aim([Kind.KILL, Kind.NODE]) for _ in range(4)} == set(cells[:2])
        assert coverage.aim([Kind.NODE]) in cells[2:]
        assert coverage.aim([Kind.AGENT]) is None
        coverage.add(cells[:2])
        assert coverage.empty() == []


class TestResults:
    def test_a_campaign_is_gone_on_with(self, tmp_path: Path) -> None:
        path = tmp_path / NAME
        before = Results(path)
        before.add(Begun(['--faults', '9'], 7))
        before.add(Refused(2, 'pp4', 'ValueError'))
        hit = Cell(Phase.MEET, Kind.KILL)
        before.add(done(1, struck(Tier.LOCALIZED, 0, 3.0, hit)))
        with path.open('ab') as file:
            file.write(b'{"type":"job","number":2,"conf')  # power was lost
        after = Results(path)
        assert after.begun() == Begun(['--faults', '9'], 7)
        assert (after.jobs, after.refusals(2), after.refusals(1)) == (before.jobs, 1, 0)
        coverage = Coverage([hit])
        after.count(coverage)
        assert coverage.empty() == []
        after.add(done(2))
        assert [job.number for job in Results(path).jobs] == [1, 2]

    def test_resumed_with_the_same_arguments_and_seed(self, tmp_path: Path) -> None:
        arguments = '--faults 9 --configurations 3 --cover meet:kill'.split()
        Results(tmp_path / NAME).add(Begun(arguments, 7))
        args = parse_arguments(['--resume', str(tmp_path)])
        assert (args.faults, args.configurations, args.seed, args.output) == (9, 3, 7, tmp_path)
        assert args.cover == [Cell(Phase.MEET, Kind.KILL)]

    def test_what_is_no_campaign_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ResultError, match='no campaign to resume'):
            Results(tmp_path / NAME).begun()
        (tmp_path / NAME).write_text('hello\n')
        with pytest.raises(ResultError, match='no results of a campaign'):
            Results(tmp_path / NAME)

    def test_summary(self, tmp_path: Path) -> None:
        results = Results(tmp_path / NAME)
        results.add(done(1, struck(Tier.LOCALIZED), struck(Tier.LOCALIZED)))
        lost = {'survivors_lost': ['rank 2'], 'identical': False}
        results.add(done(2, struck(Tier.DISK, lost=7), **lost))
        coverage = Coverage(parse_cells('meet,fetch:kill'))
        coverage.add([Cell(Phase.MEET, Kind.KILL)])
        assert results.summary(coverage) == (
            'chaos: faults=3 localized=2 whole_job=0 disk=1 lost_iterations=7 bit_identical=false '
            'phases_covered=1/2 survivors_lost=1'
        )

    @pytest.mark.parametrize(
        ('job', 'status'),
        [
            (done(1, struck(Tier.LOCALIZED)), 0),
            (done(1, struck(Tier.LOCALIZED, 1)), 1),
            (done(1, struck(Tier.LOCALIZED), identical=False), 1),
            (done(1, struck(Tier.LOCALIZED, stall_s=15.1)), 1),
            (done(1, struck(Tier.LOCALIZED), survivors_lost=['rank 2']), 1),
            (done(1, struck(Tier.LOCALIZED), failed='stands still'), 2),
        ],
    )
    def test_exit_status(self, job: JobDone, status: int, tmp_path: Path) -> None:
        results = Results(tmp_path / NAME)
        results.add(job)
        args = argparse.Namespace(max_stall=15.0)
        assert verdict(args, results, Coverage([])) == status
        assert verdict(args, results, Coverage(parse_cells('meet:kill'))) == max(status, 1)


@pytest.mark.parametrize(
    ('flags', 'complaint'),
    [
        ('--layout pp2+ep2', '--layout'),
        ('--layout pp2-ep2-dp3', 'multiple of ep'),
        ('--layout pp2-dp3', 'must divide'),
        ('--layout pp0', 'at least 1'),
        ('--nodes 3', 'another number'),
        ('--faults 0', '--faults must be at least 1'),
        ('--window none', '--window none'),
        ('--kinds kill,burn', '--kinds kill,burn'),
        ('--nodes 1 --workers-per-node 4', 'no replica survives'),
        ('--kinds agent', 'an agent torchrun'),
        ('--cover meet', 'phases:kinds'),
        ('--aimed 2', '--aimed 2'),
        ('--launcher torchrun --nodes 2', '--launcher torchrun needs'),
    ],
)
def test_wrong_flags_are_named(
    flags: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(flags.split())
    assert complaint in capsys.readouterr().err


RECOVERING = """
import sys, time
from moevement_ext.events import EventLog

def work(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass

events = EventLog(sys.argv[1], 0)
sys.stdin.readline()
for phase in sys.argv[2].split(','):
    events.emit('recovery_phase', phase=phase)
    work(0.05)
events.emit('recovered', scope=sys.argv[3])
time.sleep(60)
"""


class TestAim:
    @pytest.fixture
    def worker(self, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
        """Starts a process that writes events of a recovery once it is told to."""
        started: list[subprocess.Popen] = []

        def start(phases: str, scope: str = 'localized') -> subprocess.Popen:
            command = [sys.executable, '-c', RECOVERING, str(tmp_path), phases, scope]
            worker = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
            started.append(worker)
            while not (tmp_path / 'rank0.jsonl').exists():
                time.sleep(0.01)
            return worker

        yield start
        for worker in started:
            worker.kill()
            worker.wait()

    def catch(self, folder: Path, phase: Phase, worker: subprocess.Popen) -> dict | None:
        aim = Aim(folder, phase, suitable=lambda rank: rank == 0)
        print(file=worker.stdin, flush=True)
        return aim.catch(lambda: worker.poll() is None)

    @pytest.mark.parametrize('aimed', [Phase.MEET, Phase.FETCH, Phase.POST_STEP])
    def test_worker_stands_still_in_the_phase(
        self, aimed: Phase, tmp_path: Path, worker: Callable[..., subprocess.Popen]
    ) -> None:
        process = worker('detect,meet,respawn,regroup,fetch,regroup,post-step,first-iteration,over')
        caught = self.catch(tmp_path, aimed, process)
        assert caught is not None and caught['pid'] == process.pid
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        assert landed(read_events(tmp_path), None, time.time(), process.pid) is aimed

    @pytest.mark.parametrize(
        ('phases', 'scope'), [('detect,meet,over', 'localized'), ('detect', 'whole job')]
    )
    def test_no_such_phase(
        self, phases: str, scope: str, tmp_path: Path, worker: Callable[..., subprocess.Popen]
    ) -> None:
        assert self.catch(tmp_path, Phase.CONVERT, worker(phases, scope)) is None

    def test_the_recovery_before_is_none_of_its_business(
        self, tmp_path: Path, worker: Callable[..., subprocess.Popen]
    ) -> None:
        process = worker('first-iteration,over,detect,meet,first-iteration,over')
        caught = self.catch(tmp_path, Phase.FIRST_ITERATION, process)
        phases = [event['phase'] for event in read_events(tmp_path)]
        assert caught is not None and phases.count('first-iteration') == 2
