# SPDX-License-Identifier: Apache-2.0
"""The picture that is drawn of a run that failed."""

from pathlib import Path

import numpy as np
from matplotlib import image

from tests.unit.tools.samples import START, iteration_line, slot_line
from tools.lab.plots import Doing, Failure, Span, plot
from tools.lab.run_log import parse_log


def columns_of(picture: Path, color: tuple[int, int, int]) -> np.ndarray:
    """Columns with at least 20 pixels of a colour."""
    pixels = np.rint(255 * image.imread(picture)[..., :3]).astype(int)
    return np.flatnonzero(np.all(pixels == color, axis=-1).sum(axis=0) >= 20)


def test_a_failure_has_a_strip_of_the_stages(tmp_path: Path) -> None:
    log = parse_log(''.join(iteration_line(n, n, 6 - n / 3) + slot_line(100) for n in range(1, 7)))
    clock = START.timestamp()
    starts = Span(Doing.STARTING, clock + 4, clock + 4.5)
    lanes = {
        'lost': [starts, Span(Doing.REPLAYING, clock + 4.5, clock + 4.9)],
        'kept': [Span(Doing.WAITING, clock + 4, clock + 4.9)],
    }
    failure = Failure('stage 0 lost', clock + 4.0, log.iterations[3], log.iterations[4], lanes)
    with_strip = tmp_path / 'made' / 'with.png'
    plot(log, log, 400, with_strip, failure)
    replaying, waiting = (0xF0, 0xA2, 0x02), (0xB9, 0xD7, 0xE4)
    assert len(columns_of(with_strip, (0xC8, 0x10, 0x2E))), 'a line at the failure'
    lost, kept = columns_of(with_strip, replaying), columns_of(with_strip, waiting)
    assert len(kept) > 1.5 * len(lost) > 100, 'waits twice as long as the other replays'
