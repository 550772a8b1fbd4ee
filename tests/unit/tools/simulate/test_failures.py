# SPDX-License-Identifier: Apache-2.0
"""Traces of failures from files."""

import math
from pathlib import Path

import pytest

from tools.simulate.failures import read_trace


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
