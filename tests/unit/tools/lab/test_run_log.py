# SPDX-License-Identifier: Apache-2.0
"""The lines of a training log, read back."""

import pytest

from tests.unit.tools.samples import CONVERTED, iteration_line
from tools.lab.run_log import Captured, parse_log


def test_restart_from_memory_begins_an_attempt_even_with_consecutive_numbers() -> None:
    log = parse_log(iteration_line(3, 1, 3.0) + CONVERTED + iteration_line(4, 9, 3.0))
    assert [[item.number for item in attempt] for attempt in log.attempts] == [[3], [4]]


@pytest.mark.parametrize('again', [1, 3])
def test_a_restart_without_conversion_begins_an_attempt(again: int) -> None:
    log = parse_log(iteration_line(3, 1, 3.0) + iteration_line(again, 9, 3.0))
    assert [[item.number for item in attempt] for attempt in log.attempts] == [[3], [again]]


def test_wall_seconds_have_the_stall_of_saving_in_them() -> None:
    times = ((1, 1.0), (2, 2.0), (3, 2.5), (4, 4.5))
    log = parse_log(''.join(iteration_line(number, time) for number, time in times))
    assert log.wall_seconds(1) == pytest.approx([1.0, 0.5, 2.0])
    assert log.wall_seconds(2, 3) == pytest.approx([0.5])


def test_a_checkpoint_every_few_iterations_counts_by_the_iteration() -> None:
    line = ' sparse ckpt | window: 1 | interval: 4 | slot bytes: 800 | exposed (ms): 1.5 |\n'
    log = parse_log(iteration_line(3, 1, 3.0) + line)
    assert log.captured == [Captured(3, 1, 200, 1.5, 4)]
