# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the capture path, without a GPU."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moevement_ext.capture.layout import Piece
from moevement_ext.memory.mapped import Bytes
from moevement_ext.plan.byte_planner import InfeasiblePlan
from tests.unit.memory.samples import tmpfs_directory
from tools.bench import gpu_copy
from tools.bench.gpu_contention import Latency
from tools.bench.gpu_stage import Compute, Settings, State
from tools.lab.errors import LabError


@pytest.fixture
def shm() -> Iterator[Path]:
    with tmpfs_directory() as path:
        yield path


DEADLINE_S = 30.0
"""How long a test waits for something that comes at once."""
ALONE = 50 + 3
"""Calls with nothing else to do, of which the first are to warm up."""
SMALL = Settings(
    state_bytes=2**20,
    hidden=64,
    ffn=32,
    matmul=64,
    iteration_s=0.01,
    repeats=2,
    copies=3,
    small_calls=7,
)


def test_capture_bench_runs_on_the_cpu(shm: Path) -> None:
    report = gpu_copy.measure(torch.device('cpu'), SMALL, shm)
    assert report.identical
    assert len(report.slot_bytes) == report.window
    assert report.tensors == 12 * (2**20 // (3 * 64 * 32 * 14))
    assert 0 < report.busy_gb_per_s < float('inf')
    assert 0 < report.idle_over_limit < float('inf')
    assert report.stall_ms.min >= 0
    for small in (report.small_copy, report.launch):
        assert small.alone.calls == 7
        assert small.beside.calls >= report.window
        assert 0 < small.beside.median_us <= small.beside.p99_us <= small.beside.max_us
    assert report.exposed_ratio == pytest.approx(
        report.captured_iteration_ms.median / report.iteration_ms.median
    )


def test_capture_bench_takes_several_slots_where_one_does_not_hide(shm: Path) -> None:
    device = torch.device('cpu')
    state = State(device, SMALL)
    # At this rate three quarters of the state fit into an iteration, a part of it for overlap.
    plan = gpu_copy._plan(state, bytes_per_s=0.75 * state.nbytes, iteration_s=1.0)
    assert plan.window > 1
    window = gpu_copy.Window(shm / 'w', state.operators, plan)
    compute = Compute(device, SMALL)
    times, stalls, _ = gpu_copy._fill_busy(window, plan.window, 1, state, compute, device)
    assert len(times) == len(stalls) + 1 == plan.window
    assert window.contents_are(range(plan.window))
    assert not window.contents_are([slot + 1 for slot in range(plan.window)])


def test_capture_bench_says_when_nothing_hides() -> None:
    state = State(torch.device('cpu'), SMALL)
    with pytest.raises(InfeasiblePlan):
        gpu_copy._plan(state, bytes_per_s=1000, iteration_s=0.01)


def test_failed_capture_ends_the_bench(shm: Path) -> None:
    device = torch.device('cpu')
    state = State(device, SMALL)
    plan = gpu_copy._plan(state, bytes_per_s=1e12, iteration_s=1.0)
    window = gpu_copy.Window(shm / 'w', state.operators, plan)
    state.tensors[0].resize_(3)  # its place in the file has another size
    with pytest.raises(LabError, match='a capture failed'):
        gpu_copy._fill_idle(window, plan.window, device)


def test_latencies_are_of_calls_until_the_copies_have_arrived(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device('cpu')
    state = State(device, SMALL)
    plan = gpu_copy._plan(state, bytes_per_s=1e12, iteration_s=1.0)
    window = gpu_copy.Window(shm / 'w', state.operators, plan)
    calls, gate = [], threading.Event()

    def work() -> None:
        calls.append(1)
        if len(calls) == ALONE + 5:
            gate.set()

    copies = window._layouts[0].copies

    def gated(payload: Bytes, volatile: bool) -> list[Piece]:
        assert volatile or gate.wait(DEADLINE_S)
        return copies(payload, volatile)

    monkeypatch.setattr(window._layouts[0], 'copies', gated)
    measured = gpu_copy._beside(window, plan.window, work, 3, device)
    assert measured.alone.calls == 3
    assert measured.beside.calls == len(calls) - ALONE >= 5


def test_a_percentile_is_one_of_the_calls() -> None:
    latency = Latency.of([value / 1e6 for value in range(100, -1, -1)])
    assert latency == Latency(calls=101, median_us=50, p99_us=99, max_us=100)
    assert Latency.of([1e-6]).p99_us == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a CUDA device')
def test_without_cuda_the_gpu_bench_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_copy.main([]) == 2
    assert 'no CUDA device' in capsys.readouterr().err
