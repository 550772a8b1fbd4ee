# SPDX-License-Identifier: Apache-2.0
"""Conversion of events and figures into metrics, as a reader of the real library collects them."""

import logging
import math

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from moevement_ext.config import GUEST
from moevement_ext.events import Event, LossLogged, Recovered
from moevement_ext.job.metrics import INSTRUMENTS, Observer
from moevement_ext.protect.statistics import Figures

NAMES = {one.dotted: one.name for one in INSTRUMENTS}
LABELS = {'run': 'run', 'node': 'node0', 'rank': 3}
Values = dict[str, float]


class Observed:
    """An observer, and what its reader collects."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.observer = Observer(LABELS, [self._reader])

    def values(self, *events: Event) -> Values:
        """Values by name and further label, after these events."""
        for event in events:
            self.observer.event(event)
        found: Values = {}
        data = self._reader.get_metrics_data()
        for metric in data.resource_metrics[0].scope_metrics[0].metrics:
            for point in metric.data.data_points:
                labels = {**point.attributes}
                assert LABELS.items() <= labels.items()
                further = [labels[name] for name in labels if name not in LABELS]
                name = NAMES[metric.name, metric.unit].removeprefix('moevement_')
                found[' '.join([name, *further])] = (
                    point.sum if hasattr(point, 'sum') else point.value
                )
        return found

    def changed(self, *events: Event) -> Values:
        """Values that differ from those of an observer without events."""
        return dict(self.values(*events).items() - Observed().values().items())


def seen(figures: Figures) -> Values:
    """Values that are read of these figures."""
    observed = Observed()
    observed.observer.watch(lambda: figures, 500)
    return observed.values()


def test_failing_figures_cost_their_values_only(caplog: pytest.LogCaptureFixture) -> None:
    observed = Observed()
    observed.observer.watch(lambda: Figures(**{'no such': 'figure'}), 500)
    assert observed.values()['train_iterations'] == 500
    assert 'no such' in caplog.text


@pytest.mark.parametrize('scope', ['localized', 'whole-job'])
def test_recovery_updates_all_its_counters(scope: str) -> None:
    done = {'replayed': 2, 'verified': 3, 'verified_at': 9, 'differing': ['a', 'b', 'c', 'd']}
    of_scope = {'scope': scope} if scope == 'localized' else {}
    seconds = {'find': 0.5, 'replay': 1.0}
    assert Observed().changed(Recovered(**of_scope, **done, iterations=1, seconds=seconds)) == {
        f'recoveries {scope}': 1,
        'recovery_seconds find': 0.5,
        'recovery_seconds replay': 1.0,
        'recovery_duration_seconds': 1.5,
        'replayed_iterations': 2,
        'verified_operators': 3,
        'differing_operators': 4,
    }


@pytest.mark.parametrize('loss', [math.nan, math.inf, -math.inf, None])
def test_loss_that_is_not_finite_is_shown(
    loss: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The library drops such values, so that the gauge of the loss keeps the last finite one."""
    observed = Observed()
    with caplog.at_level(logging.ERROR):
        for logged, finite in ((5.25, 1), (loss, 0), (5.25, 1)):
            assert observed.changed(LossLogged(loss=logged)) == {
                'loss': 5.25,
                'loss_finite': finite,
            }


@pytest.mark.parametrize(('iteration', 'age'), [(12, 4), (0, 0)])
def test_window_age_is_never_negative(iteration: int, age: int) -> None:
    """A joining rank receives the persisted window before its first iteration."""
    values = seen(Figures(iteration=iteration, committed=iteration, persisted=8))
    assert values['window_age_iterations'] == age
    assert values['replication_lag_iterations'] == age


@pytest.mark.parametrize('guest', [False, True])
def test_guests_are_shown(guest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if guest:
        monkeypatch.setenv(GUEST, '1')
    assert seen(Figures())['guest'] == guest
