# SPDX-License-Identifier: Apache-2.0
"""CPU seconds for a byte, of the newest work; a rate that is kept, by a clock of the test's own."""

import threading
import time

from moevement_ext.rates import CpuCost, TokenBucket, helper_cpu_s


def burn(seconds: float) -> None:
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


class Time:
    """Advances while a caller waits, and on request."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ended = False

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        assert seconds >= 0
        if not self.ended:
            self.now += seconds
        return self.ended


def bucket(time: Time, burst: int = 0) -> TokenBucket:
    return TokenBucket(time.wait, burst, time.clock)


def test_the_rate_is_held() -> None:
    time = Time()
    held = bucket(time)
    for size in (5, 1, 20, 4):
        assert not held.take(size, 10.0)
    assert time.now == 103.0
    time.now += 0.5  # sending takes time, too
    assert not held.take(10, 10.0)
    assert time.now == 104.5, 'time in which nothing was taken is not made up for'
    held.take(20, 5.0)
    assert time.now == 108.5, 'the rate may change'


def test_bursts_are_bounded_after_any_pause() -> None:
    time = Time()
    held = bucket(time, burst=10)
    held.take(10, 10.0)
    assert (time.now, held.held_up) == (100.0, 0)
    held.take(10, 10.0)
    assert (time.now, held.held_up) == (101.0, 1)
    time.now += 1000.0
    for _ in range(3):
        held.take(10, 10.0)
    assert time.now == 1101.0 + 2.0


def test_a_late_waker_does_not_lower_the_rate() -> None:
    time = Time()
    held = TokenBucket(lambda seconds: time.wait(seconds + 0.25), 10, time.clock)
    for _ in range(101):
        held.take(10, 10.0)
    assert 200.0 <= time.now <= 200.5 + 0.25


def test_without_a_rate_nothing_waits_and_nothing_is_owed() -> None:
    time = Time()
    held = bucket(time)
    held.take(10**12, None)
    assert (time.now, held.held_up) == (100.0, 0)
    held.take(10, 10.0)
    assert time.now == 101.0
