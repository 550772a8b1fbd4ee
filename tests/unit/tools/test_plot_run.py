# SPDX-License-Identifier: Apache-2.0
"""Logs of the trainer, and the picture drawn of them."""

from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from tools.plot_run import (
    Captured,
    Doing,
    Failure,
    Lane,
    LocalizedFailure,
    Span,
    main,
    parse_log,
    plot,
    restarts,
)

START = datetime(2026, 1, 31, 23, 59, 58)
CONVERTED = (
    ' sparse ckpt | converted window: 2 | dense at iteration: 3 | replayed iterations: 1 |\n'
)


def iteration_line(number: int, seconds: float, loss: float, prefix: str = '') -> str:
    """As upstream's training_log writes it."""
    time = (START + timedelta(seconds=seconds)).strftime('%Y-%m-%d %H:%M:%S.%f')
    return (
        f'{prefix} [{time}] iteration {number:8d}/{9:8d} | consumed samples: {16 * number:12d} | '
        f'elapsed time per iteration (ms): 350.5 | learning rate: 2.1E-03 | global batch size:'
        f'    16 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 1.250 | number of skipped '
        f'iterations:   0 | number of nan iterations:   0 |\n'
    )


def slot_line(nbytes: int) -> str:
    return (
        f' sparse ckpt | window: 2 | slot bytes: {nbytes} | exposed (ms): 0.1 | persisted: none | '
        f'skipped windows: 0 | failures: 0 |\n'
    )


def plain_log(iterations: int = 6) -> str:
    return ''.join(iteration_line(n, n, 6 - n / 3) for n in range(1, iterations + 1))


def killed_log() -> str:
    """Killed after iteration 4, back after 10 seconds with iteration 4."""
    before = ''.join(iteration_line(n, n, 6 - n / 3) + slot_line(100 + n) for n in range(1, 5))
    after = ''.join(iteration_line(n, n + 10, 6 - n / 3) + slot_line(100 + n) for n in range(4, 7))
    return before + CONVERTED + after


def test_a_line_gives_time_number_duration_and_loss() -> None:
    log = parse_log('noise\n' + iteration_line(7, 3.25, 2.5, prefix='[rank3]: ') + 'noise\n')
    assert log.lives == [[((START + timedelta(seconds=3.25)).timestamp(), 7, 350.5, 2.5)]]


@pytest.mark.parametrize('interval', [1, 10])
def test_an_undisturbed_run_has_one_life(interval: int) -> None:
    numbers = [interval, 2 * interval, 3 * interval]
    log = parse_log(''.join(iteration_line(n, n, 3.0) for n in numbers))
    assert [item.number for item in log.iterations] == numbers
    assert len(log.lives) == 1


def test_a_restart_from_memory_begins_a_life_even_where_numbers_go_on() -> None:
    log = parse_log(iteration_line(3, 1, 3.0) + CONVERTED + iteration_line(4, 9, 3.0))
    assert [[item.number for item in life] for life in log.lives] == [[3], [4]]


@pytest.mark.parametrize('again', [1, 3])
def test_a_restart_without_conversion_begins_a_life(again: int) -> None:
    log = parse_log(iteration_line(3, 1, 3.0) + iteration_line(again, 9, 3.0))
    assert [[item.number for item in life] for life in log.lives] == [[3], [again]]


def test_captured_bytes_belong_to_the_iteration_logged_before() -> None:
    log = parse_log(slot_line(1) + iteration_line(3, 1, 3.0) + slot_line(77))
    assert log.captured == [Captured(3, 77)]


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


def test_a_failure_is_a_line_and_none_is_invented(tmp_path: Path) -> None:
    killed = red_pixels(draw(tmp_path, plain_log(), killed_log(), '--dense-bytes', '400'))
    assert killed.max() > 200, 'a dashed line over the height of the upper plot'
    assert red_pixels(draw(tmp_path, plain_log(), plain_log())).sum() == 0


def test_restarts_are_between_lives() -> None:
    (failure,) = restarts(parse_log(killed_log()))
    assert (failure.before.number, failure.after.number) == (4, 4)
    assert failure.time == failure.before.time
    assert restarts(parse_log(plain_log())) == []


def columns_of(picture: Path, color: tuple[int, int, int]) -> np.ndarray:
    """Columns with at least 20 pixels of a colour."""
    pixels = np.rint(255 * image.imread(picture)[..., :3]).astype(int)
    return np.flatnonzero(np.all(pixels == color, axis=-1).sum(axis=0) >= 20)


def test_a_survived_failure_has_a_strip_of_the_stages(tmp_path: Path) -> None:
    log = parse_log(plain_log())
    clock = START.timestamp()
    lanes = [
        Lane('lost', [Span(Doing.STARTING, clock + 4, clock + 4.5)]),
        Lane('kept', [Span(Doing.WAITING, clock + 4, clock + 4.9)]),
    ]
    lanes[0].spans.append(Span(Doing.REPLAYING, clock + 4.5, clock + 4.9))
    failure = Failure('stage 0 lost', clock + 4.0, log.iterations[3], log.iterations[4])
    without, with_strip = tmp_path / 'without.png', tmp_path / 'with.png'
    plot(log, log, None, without)
    plot(log, log, None, with_strip, LocalizedFailure(failure, lanes))
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
