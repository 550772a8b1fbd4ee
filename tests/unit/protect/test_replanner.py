# SPDX-License-Identifier: Apache-2.0
"""Planning anew outlives what it works with; what it decides: `tests/unit/plan`."""

import queue
from datetime import timedelta
from functools import partial

import pytest

from moevement_ext.plan.replanning import PlanParameters, WindowLoad, decide_plan
from moevement_ext.protect.replanner import Replanner
from tests.unit.protect.distant_store import DistantStore
from tests.unit.replicate.peers import wait_for

DEADLINE_S = 20.0
"""How long a test waits for something that comes at once."""


def load(start: int, *tokens: int) -> WindowLoad:
    counts = {f'layer1.expert{expert}': count for expert, count in enumerate(tokens)}
    return WindowLoad(start, counts, 1.0, copy_bytes_per_s=1e9)


def test_a_lost_connection_does_not_end_planning(caplog: pytest.LogCaptureFixture) -> None:
    server = DistantStore()
    adopted: queue.Queue[PlanParameters] = queue.Queue()
    replanner = Replanner(
        server.connect(timedelta(seconds=DEADLINE_S)),
        0,
        1,
        PlanParameters(0, 0, 2, {}),
        partial(decide_plan, best_window=None, change=0.1, fraction=0.25),
        adopted.put,
    )
    try:
        replanner.observe(load(0, 10, 30))
        assert adopted.get(timeout=DEADLINE_S).version == 1
        server.cut()
        replanner.observe(load(8, 20, 20))
        wait_for(lambda: 'windows are not planned anew' in caplog.text)
        assert adopted.empty()
        server.mend()
        replanner.observe(load(16, 30, 10))
        second = adopted.get(timeout=4 * DEADLINE_S)
        assert (second.version, second.shares['layer1.expert0']) == (2, 0.75)
    finally:
        replanner.stop()
    assert caplog.text.count('out of reach') == 1
    assert 'cannot re-plan' not in caplog.text
