# SPDX-License-Identifier: Apache-2.0
"""Failure processes: rates and order; traces from files."""

import math
from pathlib import Path

import numpy as np
import pytest

from tools.simulate.failures import Process, read_trace

RNG = np.random.default_rng


@pytest.mark.parametrize(
    'process',
    [
        Process(100.0),
        Process(100.0, 0.6),
        Process(100.0, 2.5),
    ],
    ids=str,
)
def test_failures_have_their_rate_order_and_range(process: Process) -> None:
    drawn = process.until(RNG(1), 50, 50_000.0, 7)
    counts = (drawn.times < math.inf).sum(axis=1)
    assert counts.mean() == pytest.approx(500, rel=0.03)
    assert (np.diff(np.where(drawn.times < math.inf, drawn.times, 1e9), axis=1) >= 0).all()
    finite = drawn.times[drawn.times < math.inf]
    assert 0 <= finite.min() and finite.max() < 50_000
    assert set(np.unique(drawn.nodes)) == set(range(7))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / 'trace.csv'
    path.write_text(text, 'utf-8')
    return path


@pytest.mark.parametrize(
    ('start', 'times', 'length'),
    [(0, [100, 130, 400], 500), (1_700_000_000, [0, 30, 300], 400)],
    ids=['of the job', 'of a clock'],
)
def test_trace_is_read(tmp_path: Path, start: int, times: list[int], length: int) -> None:
    events = ((130, 'failure,a'), (100, 'failure,a'), (160, 'repair,a'), (400, 'failure,b'))
    text = ''.join(f'{start + time},{event}\n' for time, event in events)
    trace = read_trace(write(tmp_path, f'time,event,node\n{text}'))
    assert trace.times.tolist() == times
    assert trace.nodes.tolist() == [0, 0, 1] and trace.least_nodes == 2
    assert trace.repair_s.tolist() == [60, 30, math.inf]
    assert trace.length_s == length and trace.mtbf_s == pytest.approx(length / 3)
