# SPDX-License-Identifier: Apache-2.0
"""The picture that is drawn of the log of a run."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from tests.unit.tools.samples import CONVERTED, START, iteration_line, slot_line
from tools.lab.plots import Doing, Failure, Span, plot
from tools.lab.run_log import parse_log
from tools.plot_run import main


def plain_log(iterations: int = 6) -> str:
    return ''.join(iteration_line(n, n, 6 - n / 3) for n in range(1, iterations + 1))


def killed_log() -> str:
    """Killed after iteration 4, back after 10 seconds with iteration 4."""
    before = ''.join(iteration_line(n, n, 6 - n / 3) + slot_line(100 + n) for n in range(1, 5))
    after = ''.join(iteration_line(n, n + 10, 6 - n / 3) + slot_line(100 + n) for n in range(4, 7))
    return before + CONVERTED + after


def red_pixels(picture: Path) -> np.ndarray:
    """Number of pixels in the colour of failures, by column of the picture."""
    pixels = np.rint(255 * image.imread(picture)[..., :3]).astype(int)
    return np.all(pixels == (0xC8, 0x10, 0x2E), axis=-1).sum(axis=0)


def draw(tmp_path: Path, plain: str, sparse: str, *flags: str) -> Path:
    for name, text in (('plain', plain), ('sparse', sparse)):
        (tmp_path / f'{name}.log').write_text(text)
    picture = tmp_path / 'made' / 'run.png'
    logs = ['--plain', str(tmp_path / 'plain.log'), '--sparse', str(tmp_path / 'sparse.log')]
    assert main([*logs, '--output', str(picture), *flags]) == 0
    return picture


def test_each_failure_is_one_line_in_the_plot(tmp_path: Path) -> None:
    killed = red_pixels(draw(tmp_path, plain_log(), killed_log(), '--dense-bytes', '400'))
    assert killed.max() > 200, 'a dashed line over the height of the upper plot'
    assert red_pixels(draw(tmp_path, plain_log(), plain_log())).sum() == 0


def columns_of(picture: Path, color: tuple[int, int, int]) -> np.ndarray:
    """Columns with at least 20 pixels of a colour."""
    pixels = np.rint(255 * image.imread(picture)[..., :3]).astype(int)
    return np.flatnonzero(np.all(pixels == color, axis=-1).sum(axis=0) >= 20)


def test_a_survived_failure_has_a_strip_of_the_stages(tmp_path: Path) -> None:
    log = parse_log(plain_log())
    clock = START.timestamp()
    starts = Span(Doing.STARTING, clock + 4, clock + 4.5)
    lanes = {
        'lost': [starts, Span(Doing.REPLAYING, clock + 4.5, clock + 4.9)],
        'kept': [Span(Doing.WAITING, clock + 4, clock + 4.9)],
    }
    failure = Failure('stage 0 lost', clock + 4.0, log.iterations[3], log.iterations[4], lanes)
    without, with_strip = tmp_path / 'without.png', tmp_path / 'with.png'
    plot(log, log, None, without)
    plot(log, log, None, with_strip, failure)
    replaying, waiting = (0xF0, 0xA2, 0x02), (0xB9, 0xD7, 0xE4)
    assert columns_of(without, replaying).size == 0
    assert red_pixels(without).sum() == 0
    assert red_pixels(with_strip).max() > 200
    lost, kept = columns_of(with_strip, replaying), columns_of(with_strip, waiting)
    assert len(kept) > 1.5 * len(lost) > 100, 'waits twice as long as the other replays'


@pytest.mark.parametrize('content', [None, '', 'a log of something else\n'])
def test_an_unusable_log_is_refused_by_name(
    tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    log, picture = tmp_path / 'some.log', tmp_path / 'run.png'
    if content is not None:
        log.write_text(content)
    assert main(['--plain', str(log), '--sparse', str(log), '--output', str(picture)]) == 2
    assert str(log) in capsys.readouterr().err
    assert not picture.exists()
