# SPDX-License-Identifier: Apache-2.0
"""From the events of a run to what the simulator says of it."""

from pathlib import Path
from typing import Any

import pytest

from moevement_ext.events import WindowCommitted
from tests.unit.tools.runs import EXPOSED_S, localized_run, write
from tests.unit.tools.samples import event
from tools.model.description import DescriptionError
from tools.simulate.monte_carlo import Pipeline
from tools.simulate.profile import OperatorProfile, derive

MTBF_S = 24.0
"""Of the sample run: one failure in so many seconds."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path / 'events', localized_run())


def changed(kind: type[Any], **fields: Any) -> list[Any]:
    """The sample run with other fields in the events of a kind."""
    return [
        event(kind, one.rank, one.time, pid=one.pid, iteration=one.iteration,
              **{**one.own_fields(), **fields}) if isinstance(one, kind) else one
        for one in localized_run()
    ]  # fmt: skip


def test_events_give_the_profile(run: Path) -> None:
    found = derive(run, {})
    assert found.iteration_s == pytest.approx(1 - EXPOSED_S)
    assert (found.copy_bytes_per_s, found.network_bytes_per_s) == (1e9, 1e8)
    assert found.disk_bytes_per_s is None
    assert (found.replicas, found.mtbf_s) == (1, MTBF_S)
    assert found.restart_s == pytest.approx(4.5 - 2)  # without convert and catch_up
    assert found.pipeline == Pipeline(nodes=4, stages=2)
    assert found.operators == (
        OperatorProfile('layer1.router', 12, 2),
        OperatorProfile('layer1.expert0', 240, 40, 1.0),
        OperatorProfile('layer1.expert1', 240, 40, 1.0),
    )


@pytest.mark.parametrize(
    ('events', 'message'),
    [
        ([], 'there are no events'),
        ([one for one in localized_run() if one.time < 5], 'give the events of a longer run'),
        (changed(WindowCommitted, send_bytes_per_s=None), 'give --network-bandwidth'),
    ],
    ids=['none', 'too few', 'no replicas'],
)
def test_what_is_missing_is_named(events: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match=message):
        derive(write(tmp_path, events), {})
