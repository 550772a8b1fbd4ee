# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: what they read out of logs and events, and the capture path without a GPU."""

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest
import torch

from moevement_ext.plan.byte_planner import InfeasiblePlan
from tests.unit.memory.samples import tmpfs_directory
from tools import bench_gpu_copy, bench_overhead, bench_recovery
from tools.bench import model
from tools.bench.figures import Spread, write_json
from tools.bench.hardware import Hardware
from tools.bench.jobs import CpuClock, captured, wall_seconds
from tools.demo.failure import DemoError
from tools.plot_run import RunLog, parse_log

START = datetime(2026, 1, 31, 23, 59, 58)
HARDWARE = Hardware('a processor', 2, 24.0, None, 0.1, '2.15', '0.19.2')
CONVERTED = (
    ' sparse ckpt | converted window: 2 | dense at iteration: 4 | replayed iterations: 2 |\n'
)


def log_of(*iterations: tuple[int, float] | str) -> RunLog:
    """Of pairs of number and seconds, and of other lines."""
    return parse_log(''.join(_line(item) for item in iterations))


def _line(item: tuple[int, float] | str) -> str:
    if isinstance(item, str):
        return item
    number, seconds = item
    time = (START + timedelta(seconds=seconds)).strftime('%Y-%m-%d %H:%M:%S.%f')
    return (
        f' [{time}] iteration {number:8d}/      99 | consumed samples: 16 | elapsed time per '
        'iteration (ms): 500.0 | learning rate: 2.1E-03 | lm loss: 5.0E+00 | loss scale: 1.0 |\n'
    )


def run_of(variant: str, iteration_s: float, digest: str = 'same') -> bench_overhead.Run:
    dense = variant == bench_overhead.DENSE_IN_MEMORY
    return bench_overhead.Run(
        variant=variant,
        iteration_s=iteration_s,
        all_iterations_s=[iteration_s],
        cpu_s=2 * iteration_s,
        exposed_ms=1.0 if dense or variant == bench_overhead.SPARSE else None,
        windows=[1] if dense else [2],
        slot_bytes=[100] if dense else [70, 50],
        digest=digest,
    )


def overhead_report(*sparse_s: float, digest: str = 'same') -> bench_overhead.Report:
    """One round for each time of the sparse variant; round n of the others takes n seconds."""
    bench = bench_overhead.Bench(Path(), Path(), 2, 14, 4, 'auto')
    rounds = [
        [
            run_of(name, seconds if name == bench_overhead.SPARSE else number, digest='same')
            for name in bench_overhead.TITLES
        ]
        for number, seconds in enumerate(sparse_s, 1)
    ]
    rounds[0][0] = run_of(bench_overhead.PLAIN, 1.0, digest)
    return bench_overhead.summarize(bench, HARDWARE, rounds)


# Logs


def test_wall_seconds_have_the_stall_of_saving_in_them() -> None:
    log = log_of((1, 1.0), (2, 2.0), (3, 2.5), (4, 4.5))
    assert wall_seconds(log.iterations, warm_up=1) == pytest.approx([1.0, 0.5, 2.0])
    assert wall_seconds(log.iterations, warm_up=2) == pytest.approx([0.5, 2.0])


def test_captured_reads_the_log_line() -> None:
    line = (
        '[rank1]:  sparse ckpt | window: 8 | slot bytes: 4096 | exposed (ms): 0.3 | persisted: 0 '
        '| skipped windows: 0 | failures: 0 |\n'
    )
    [found] = captured(_line((1, 0.0)) + line + CONVERTED)
    assert found == (8, 4096, 0.3)


def test_cpu_clock_interpolates_between_samples() -> None:
    clock = CpuClock.__new__(CpuClock)  # the samples are all it takes
    clock._times, clock._seconds = [10.0, 20.0, 30.0], [0.0, 5.0, 4.0]
    assert clock.seconds(12.0, 20.0) == pytest.approx(4.0)
    assert clock.seconds(20.0, 30.0) == 0  # a child that ended takes nothing back


# Overhead


def test_ratios_are_taken_within_a_round() -> None:
    report = overhead_report(1.5, 2.2, 6.0)
    ratio = report.variants[bench_overhead.SPARSE].ratio
    assert ratio.min == pytest.approx(1.1)
    assert ratio.median == pytest.approx(1.5)
    assert ratio.max == pytest.approx(2.0)
    assert report.variants[bench_overhead.PLAIN].ratio == Spread(1, 1, 1)


def test_slots_are_compared_with_a_window_of_one_slot() -> None:
    slots = overhead_report(1.0).slot_bytes
    assert (slots.dense, slots.mean, slots.max) == (100, 60, 70)
    assert slots.mean_over_dense == pytest.approx(0.6)
    assert slots.max_over_dense == pytest.approx(0.7)


@pytest.mark.parametrize(('digest', 'identical'), [('same', True), ('other', False)])
def test_runs_that_end_differently_are_noticed(digest: str, identical: bool) -> None:
    assert overhead_report(1.0, digest=digest).identical is identical


def test_exit_status_says_whether_the_runs_are_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for digest, status in (('same', 0), ('other', 1)):
        report = overhead_report(1.0, digest=digest)
        monkeypatch.setattr(bench_overhead, 'measure', lambda *_, found=report: found)
        assert bench_overhead.main(['--json', str(tmp_path / 'o.json')]) == status
        assert json.loads((tmp_path / 'o.json').read_text())['identical'] is (status == 0)


@pytest.mark.parametrize(
    'flags', [['--ranks', '3'], ['--rounds', '0'], ['--iterations', '5'], ['--window', 'some']]
)
def test_wrong_flags_of_overhead_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        bench_overhead.parse_arguments(flags)
    assert refused.value.code == 2


def test_every_variant_but_plain_adds_flags() -> None:
    bench = bench_overhead.Bench(Path('data'), Path('out'), 2, 14, 4, 'auto')
    added = {
        name: bench._protection(name, Path('/m'), Path('/c'), Path('/e'))
        for name in bench_overhead.TITLES
    }
    assert added.pop(bench_overhead.PLAIN) == []
    assert len({tuple(flags) for flags in added.values()}) == 4
    assert all(flags for flags in added.values())


@pytest.mark.parametrize(('ranks', 'stages'), [(2, '1'), (4, '2')])
def test_ranks_are_two_per_stage(ranks: int, stages: str) -> None:
    flags = model.training_flags(Path('data'), ranks, 10, Path('digest.json'))
    assert flags[flags.index('--pipeline-model-parallel-size') + 1] == stages
    assert flags[flags.index('--expert-model-parallel-size') + 1] == '2'


# Recovery


def test_phases_of_a_dense_recovery_add_up() -> None:
    killed_at = (START + timedelta(seconds=5)).timestamp()
    log = log_of((4, 4.0), (5, 5.0), (3, 15.5), (4, 16.5), (5, 17.5), (6, 18.5))
    found = bench_recovery.dense_recovery(log, killed_at, [])
    assert found.died_after == 5
    assert found.recomputed == 3
    assert found.seconds == pytest.approx(13.5)
    assert found.phases == pytest.approx(
        {'process start, load': 10.0, 'recompute': 2.5, 'new iteration': 1.0}
    )


def sparse_events(killed_at: float) -> list[dict[str, object]]:
    """Two ranks; rank 1 is slower."""
    seconds = {'find': 0.5, 'obtain': 0.5, 'load': 1.0, 'convert': 2.0, 'catch_up': 1.0}
    events = [
        {'time': killed_at - 9, 'event': 'worker_started', 'rank': 0},
        {'time': killed_at + 4, 'event': 'worker_started', 'rank': 0},
        {'time': killed_at + 5, 'event': 'worker_started', 'rank': 1},
    ]
    for rank, time in ((0, 11.5), (1, 12.0)):
        recovered = {'event': 'recovered', 'rank': rank, 'replayed': 3, 'seconds': seconds}
        events.append({'time': killed_at + time, **recovered})
    return events


def test_phases_of_a_sparse_recovery_add_up() -> None:
    killed_at = (START + timedelta(seconds=5)).timestamp()
    log = log_of((4, 4.0), (5, 5.0), CONVERTED, (5, 16.8), (6, 18.0))
    events = sparse_events(killed_at)
    found = bench_recovery.sparse_recovery(log, killed_at, events, 2, ['rng'])
    assert found.recomputed == 3
    assert found.seconds == pytest.approx(13.0)
    assert sum(found.phases.values()) == pytest.approx(found.seconds)
    assert found.phases['process start'] == pytest.approx(5.0)
    assert found.phases['set-up'] == pytest.approx(2.0)
    assert found.phases['catch up'] == pytest.approx(1.0)
    assert found.phases['new iteration'] == pytest.approx(1.0)


def test_exit_status_is_that_of_sparse_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = bench_recovery.Recovery(1.0, {'process start': 1.0}, 1, 25, [])
    inexact = msgspec.structs.replace(exact, seconds=3.0, different=['rng'])
    bench = bench_recovery.Bench(Path(), Path(), 2, 25, 10, 'auto')
    for sparse, dense, status in ((exact, inexact, 0), (inexact, exact, 1)):
        runs = {bench_recovery.SPARSE: sparse, bench_recovery.DENSE: dense}
        report = bench_recovery.summarize(bench, HARDWARE, [runs])
        assert report.ratio.median == dense.seconds / sparse.seconds
        monkeypatch.setattr(bench_recovery, 'measure', lambda *_, found=report: found)
        assert bench_recovery.main([]) == status


def test_a_rank_that_did_not_recover_from_memory_is_no_result() -> None:
    killed_at = START.timestamp()
    log = log_of((4, 4.0), CONVERTED, (5, 16.8))
    with pytest.raises(DemoError, match='did not report'):
        bench_recovery.sparse_recovery(log, killed_at, sparse_events(killed_at)[:4], 2, [])


def test_a_job_that_stays_behind_is_no_result() -> None:
    with pytest.raises(DemoError, match='never got beyond iteration 5'):
        bench_recovery.first_new_iteration(log_of((5, 5.0), (4, 8.0), (5, 9.0)))


def test_kill_comes_half_way_between_two_checkpoints() -> None:
    assert bench_recovery.parse_arguments(['--dense-interval', '8']).kill_after == 20
    with pytest.raises(SystemExit):
        bench_recovery.parse_arguments(['--kill-after', '10'])


# The capture path


@pytest.fixture
def shm() -> Iterator[Path]:
    with tmpfs_directory() as path:
        yield path


SMALL = bench_gpu_copy.Settings(
    state_bytes=2**20, hidden=64, ffn=32, matmul=64, iteration_s=0.01, repeats=2, copies=3
)


def test_capture_bench_runs_on_the_cpu(shm: Path) -> None:
    report = bench_gpu_copy.measure(torch.device('cpu'), SMALL, shm)
    assert report.identical
    assert len(report.slot_bytes) == report.window
    assert report.tensors == 12 * (2**20 // (3 * 64 * 32 * 14))
    assert 0 < report.busy_gb_per_s < float('inf')
    assert 0 < report.idle_over_limit < float('inf')
    assert report.exposed_ratio == pytest.approx(
        report.captured_iteration_ms.median / report.iteration_ms.median
    )


def test_capture_bench_takes_several_slots_where_one_does_not_hide(shm: Path) -> None:
    device = torch.device('cpu')
    state = bench_gpu_copy.State(device, SMALL)
    # At this rate three quarters of the state fit into an iteration, a part of it for overlap.
    plan = bench_gpu_copy._plan(state, bytes_per_s=0.75 * state.nbytes, iteration_s=1.0)
    assert plan.window > 1
    window = bench_gpu_copy.Window(shm / 'w', state.operators, plan)
    compute = bench_gpu_copy.Compute(device, SMALL)
    times, _ = bench_gpu_copy._fill_busy(window, plan.window, 1, state, compute, device)
    assert len(times) == plan.window
    assert window.contents_are(range(plan.window))
    assert not window.contents_are([slot + 1 for slot in range(plan.window)])


def test_capture_bench_says_when_nothing_hides() -> None:
    state = bench_gpu_copy.State(torch.device('cpu'), SMALL)
    with pytest.raises(InfeasiblePlan):
        bench_gpu_copy._plan(state, bytes_per_s=1000, iteration_s=0.01)


def test_failed_capture_ends_the_bench(shm: Path) -> None:
    device = torch.device('cpu')
    state = bench_gpu_copy.State(device, SMALL)
    plan = bench_gpu_copy._plan(state, bytes_per_s=1e12, iteration_s=1.0)
    window = bench_gpu_copy.Window(shm / 'w', state.operators, plan)
    state.tensors[0].resize_(3)  # its place in the file has another size
    with pytest.raises(bench_gpu_copy.BenchError, match='a capture failed'):
        bench_gpu_copy._fill_idle(window, plan.window, device)


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a CUDA device')
def test_without_cuda_the_gpu_bench_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_gpu_copy.main([]) == 2
    assert 'no CUDA device' in capsys.readouterr().err


# Reports


def test_report_is_json_without_hosts_or_folders(tmp_path: Path) -> None:
    target = tmp_path / 'new' / 'report.json'
    write_json(target, {'hardware': Hardware.here(gpu=False), 'value': 1.23456789})
    report = msgspec.json.decode(target.read_bytes())
    assert report['value'] == 1.2346
    assert report['hardware']['cores'] >= 1
    assert '/' not in report['hardware']['processor']
