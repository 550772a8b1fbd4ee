# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the capture path, without a GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moevement_ext.plan.byte_planner import InfeasiblePlan
from tests.unit.memory.samples import tmpfs_directory
from tools.bench import gpu_copy
from tools.lab.errors import LabError


@pytest.fixture
def shm() -> Iterator[Path]:
    with tmpfs_directory() as path:
        yield path


SMALL = gpu_copy.Settings(
    state_bytes=2**20, hidden=64, ffn=32, matmul=64, iteration_s=0.01, repeats=2, copies=3
)


def test_capture_bench_runs_on_the_cpu(shm: Path) -> None:
    report = gpu_copy.measure(torch.device('cpu'), SMALL, shm)
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
    state = gpu_copy.State(device, SMALL)
    # At this rate three quarters of the state fit into an iteration, a part of it for overlap.
    plan = gpu_copy._plan(state, bytes_per_s=0.75 * state.nbytes, iteration_s=1.0)
    assert plan.window > 1
    window = gpu_copy.Window(shm / 'w', state.operators, plan)
    compute = gpu_copy.Compute(device, SMALL)
    times, _ = gpu_copy._fill_busy(window, plan.window, 1, state, compute, device)
    assert len(times) == plan.window
    assert window.contents_are(range(plan.window))
    assert not window.contents_are([slot + 1 for slot in range(plan.window)])


def test_capture_bench_says_when_nothing_hides() -> None:
    state = gpu_copy.State(torch.device('cpu'), SMALL)
    with pytest.raises(InfeasiblePlan):
        gpu_copy._plan(state, bytes_per_s=1000, iteration_s=0.01)


def test_failed_capture_ends_the_bench(shm: Path) -> None:
    device = torch.device('cpu')
    state = gpu_copy.State(device, SMALL)
    plan = gpu_copy._plan(state, bytes_per_s=1e12, iteration_s=1.0)
    window = gpu_copy.Window(shm / 'w', state.operators, plan)
    state.tensors[0].resize_(3)  # its place in the file has another size
    with pytest.raises(LabError, match='a capture failed'):
        gpu_copy._fill_idle(window, plan.window, device)


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a CUDA device')
def test_without_cuda_the_gpu_bench_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_copy.main([]) == 2
    assert 'no CUDA device' in capsys.readouterr().err
