# SPDX-License-Identifier: Apache-2.0
"""What becomes of events, without a program that shows it."""

import pytest

from moevement_ext.events import FailureDetected, Finished, LossLogged
from moevement_ext.metrics.instruments import INSTRUMENTS, Instrument, Kind
from moevement_ext.metrics.observer import Observer
from moevement_ext.protect.statistics import Figures


class Noted:
    """A recorder that notes what it is told."""

    def __init__(self) -> None:
        self.added: list[tuple[str, float]] = []
        self.values: dict[str, float] = {}

    def add(self, instrument: Instrument, amount: float, label: str | None = None) -> None:
        self.added.append((instrument.name, amount))

    def set(self, instrument: Instrument, value: float, label: str | None = None) -> None:
        self.values[instrument.name] = value

    def close(self) -> None:
        pass


def test_counters_begin_at_zero_so_that_a_rate_sees_the_first_event() -> None:
    recorder = Noted()
    observer = Observer([recorder])
    counters = [one.name for one in INSTRUMENTS if one.kind is Kind.COUNTER and one.label is None]
    assert recorder.added == [(name, 0) for name in counters]
    recorder.added.clear()
    observer.event(FailureDetected(reason='rank 2'))
    assert recorder.added == [('moevement_failures_detected', 1)]
    observer.close()
    assert recorder.values == {}


def test_what_is_not_known_has_no_value() -> None:
    for disk_bytes in (None, 7):
        recorder = Noted()
        observer = Observer([recorder])
        observer.watch(lambda known=disk_bytes: Figures(iteration=3, disk_bytes=known))
        observer.close()
        assert recorder.values['moevement_iteration'] == 3
        assert recorder.values.get('moevement_disk_bytes') == disk_bytes


def test_the_newest_loss_that_was_logged_is_shown() -> None:
    recorder = Noted()
    observer = Observer([recorder])
    for loss in (5.5, 5.25):
        observer.event(LossLogged(loss=loss))
    assert recorder.values == {'moevement_loss': 5.25}


@pytest.mark.parametrize(('iteration', 'age'), [(12, 4), (0, 0)])
def test_no_window_is_younger_than_now(iteration: int, age: int) -> None:
    """A rank that joins hears what is persisted before it has any iteration."""
    recorder = Noted()
    observer = Observer([recorder])
    observer.watch(lambda: Figures(iteration=iteration, persisted=8))
    observer.close()
    assert recorder.values['moevement_window_age_iterations'] == age


def test_whether_a_job_came_to_its_end_can_be_asked() -> None:
    recorder = Noted()
    observer = Observer([recorder])
    observer.aim(500)
    assert recorder.values == {'moevement_train_iterations': 500, 'moevement_finished': 0}
    observer.event(Finished(removed=True))
    assert recorder.values['moevement_finished'] == 1
    observer.close()
