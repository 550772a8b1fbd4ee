# SPDX-License-Identifier: Apache-2.0
"""From the events of a run to what the simulator says of it."""

from pathlib import Path

import pytest

from tests.unit.tools.runs import EXPOSED_S, localized_run, write
from tools.simulate.monte_carlo import Pipeline
from tools.simulate.profile import OperatorProfile, derive

MTBF_S = 24.0
"""Of the sample run: one failure in so many seconds."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path / 'events', localized_run())


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
