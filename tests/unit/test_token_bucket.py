# SPDX-License-Identifier: Apache-2.0
"""A rate that is kept, by a clock of the test's own."""

from moevement_ext.token_bucket import TokenBucket


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
