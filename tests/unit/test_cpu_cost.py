# SPDX-License-Identifier: Apache-2.0
"""CPU seconds for a byte: of the thread that works, and of the newest work."""

import threading
import time

import pytest

from moevement_ext import cpu_cost
from moevement_ext.cpu_cost import CpuCost, helper_cpu_s


def burn(seconds: float) -> None:
    """CPU seconds of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_waits_and_other_threads_cost_nothing() -> None:
    cost = CpuCost()
    beside = threading.Thread(target=burn, args=(0.5,))
    with cost.of(100):
        beside.start()
        beside.join()
    assert cost.s_per_byte() < 0.5 / 100
    with cost.of(100):
        burn(0.5)
    assert cost.s_per_byte() >= 0.5 / 200


def test_a_second_pass_counts_its_time_but_no_bytes() -> None:
    cost = CpuCost()
    assert cost.s_per_byte() == 0
    cost.add(0, 1.0)
    assert cost.s_per_byte() == 0, 'of no bytes yet'
    cost.add(100, 3.0)
    assert cost.s_per_byte() == 0.04


def test_failed_work_does_not_count() -> None:
    cost = CpuCost()
    with pytest.raises(OSError, match='gone'), cost.of(100):
        raise OSError('gone')
    assert cost.s_per_byte() == 0


def test_old_work_is_forgotten() -> None:
    cost = CpuCost()
    cost.add(1, 1e6)
    for _ in range(cpu_cost._NEWEST):
        cost.add(100, 1.0)
    assert cost.s_per_byte() == 0.01


def test_threads_beside_the_training_thread_are_counted_while_they_live() -> None:
    burnt, stop = threading.Event(), threading.Event()

    def work() -> None:
        burn(0.3)
        burnt.set()
        stop.wait()

    before = helper_cpu_s()
    beside = threading.Thread(target=work, daemon=True)
    beside.start()
    burn(1.0)
    assert burnt.wait(60)
    assert 0.3 <= helper_cpu_s() - before < 1.0
    stop.set()
    beside.join()
