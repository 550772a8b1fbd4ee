# SPDX-License-Identifier: Apache-2.0
"""Conversion of events into metrics, without an exporter."""

import threading

import pytest

from moevement_ext.events import FailureDetected, Finished, JobDescribed, LossLogged, Recovered
from moevement_ext.job.metrics import observer as metrics
from moevement_ext.job.metrics.instruments import INSTRUMENTS, Instrument
from moevement_ext.job.metrics.observer import Observer
from moevement_ext.protect.statistics import Figures


class Noted:
    """A meter that records all values."""

    def __init__(self) -> None:
        self.added: list[tuple[str, float]] = []
        self.values: dict[str, float] = {}

    def record(self, instrument: Instrument, value: float, label: str | None = None) -> None:
        if instrument.counts:
            self.added.append((instrument.name + (f' {label}' if label else ''), value))
        else:
            self.values[instrument.name] = value

    def close(self) -> None:
        pass


def seen(figures: Figures) -> Noted:
    """Values after one or more readings of these figures."""
    meter = Noted()
    observer = Observer(meter)
    observer.watch(lambda: figures, 500)
    observer.close()
    return meter


def test_counters_start_at_zero() -> None:
    meter = Noted()
    observer = Observer(meter)
    counters = [one.name for one in INSTRUMENTS if one.counts and one.label is None]
    assert meter.added == [(name, 0) for name in counters]
    meter.added.clear()
    observer.event(FailureDetected(reason='rank 2'))
    assert meter.added == [('moevement_failures_detected', 1)]
    observer.close()
    assert meter.values == {}


def test_unknown_figures_have_no_value() -> None:
    for disk_bytes in (None, 7):
        values = seen(Figures(iteration=3, disk_bytes=disk_bytes)).values
        assert values['moevement_iteration'] == 3
        assert values.get('moevement_disk_bytes') == disk_bytes


def test_growing_figures_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated readings, and the last one at the end, do not count twice."""
    monkeypatch.setattr(metrics, '_PERIOD_S', 0.001)
    meter, looks, enough = Noted(), [0], threading.Event()

    def figures() -> Figures:
        looks[0] += 1
        if looks[0] == 3:
            enough.set()
        return Figures(iterations=7, training_s=1.5)

    observer = Observer(meter)
    observer.watch(figures, 500)
    assert enough.wait(60.0)
    observer.close()
    added = meter.added
    assert sum(amount for name, amount in added if name == 'moevement_iterations') == 7
    assert sum(amount for name, amount in added if name == 'moevement_training_seconds') == 1.5


@pytest.mark.parametrize('scope', ['localized', 'whole-job'])
def test_recovery_updates_all_its_counters(scope: str) -> None:
    meter = Noted()
    observer = Observer(meter)
    meter.added.clear()
    done = {'replayed': 2, 'verified': 3, 'verified_at': 9, 'differing': ['a', 'b', 'c', 'd']}
    of_scope = {'scope': scope} if scope == 'localized' else {}
    seconds = {'find': 0.5, 'replay': 1.0}
    observer.event(Recovered(**of_scope, **done, iterations=1, seconds=seconds))
    observer.close()
    parts = [
        (f'recoveries {scope}', 1),
        ('recovery_seconds find', 0.5),
        ('recovery_seconds replay', 1.0),
        ('replayed_iterations', 2),
        ('verified_operators', 3),
        ('differing_operators', 4),
    ]
    assert meter.added == [(f'moevement_{name}', amount) for name, amount in parts]


def test_loss_gauge_shows_the_newest_logged_loss() -> None:
    meter = Noted()
    observer = Observer(meter)
    for loss in (5.5, 5.25):
        observer.event(LossLogged(loss=loss))
    observer.close()
    assert meter.values == {'moevement_loss': 5.25}


@pytest.mark.parametrize(('iteration', 'age'), [(12, 4), (0, 0)])
def test_window_age_is_never_negative(iteration: int, age: int) -> None:
    """A joining rank receives the persisted window before its first iteration."""
    values = seen(Figures(iteration=iteration, committed=iteration, persisted=8)).values
    assert values['moevement_window_age_iterations'] == age
    assert values['moevement_replication_lag_iterations'] == age


def test_finished_gauge_is_set_at_the_end_of_the_job() -> None:
    meter = Noted()
    observer = Observer(meter)
    observer.watch(Figures, 500)
    assert meter.values['moevement_train_iterations'] == 500
    assert meter.values['moevement_finished'] == 0
    observer.event(Finished(removed=True))
    assert meter.values['moevement_finished'] == 1
    observer.close()


def test_layout_gauge_has_a_value_for_each_dimension() -> None:
    values: dict[str | None, float] = {}

    class ByKind(Noted):
        def record(self, instrument: Instrument, value: float, label: str | None = None) -> None:
            if instrument.name == 'moevement_layout_ranks':
                values[label] = value

    observer = Observer(ByKind())
    observer.event(
        JobDescribed(
            train_iterations=1, model='', layout={'ranks': 4, 'expert': 2}, versions={}, command=[]
        )
    )
    observer.close()
    assert values == {'ranks': 4, 'expert': 2}
