# SPDX-License-Identifier: Apache-2.0
"""Windows re-planned during the run: by popularity, and by measured times with `auto`."""

from contextlib import suppress

import pytest

from moevement_ext.config import CAPACITY, FIXED, ORDERS
from moevement_ext.events import Recovered, Replanned, WindowPersisted
from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.setups import BF16, PP_EP, UNTIED

pytestmark = pytest.mark.thorough

FLAGS = f'{BF16} {PP_EP} {UNTIED} --train-iters 20'.split()
# Any change of any expert's share re-plans.
RESTLESS = ['reorder_change=0', 'reorder_fraction=0.01']


@pytest.mark.parametrize('order', ORDERS)
def test_windows_of_any_order_are_recovered(
    order: str, cluster: Make, reference: Reference
) -> None:
    capacity = '--moe-expert-capacity-factor 1.0'.split() if order == CAPACITY else []
    job = cluster(
        *FLAGS, *capacity, *RESTLESS, '--sparse-ckpt-window', '2', '--sparse-ckpt-order', order
    )
    assert -9 in job.run(fail_at='1:18:backward')
    plans = {event.plan for event in job.events_of(WindowPersisted)}
    replanned = job.events_of(Replanned, rank=3)
    if order == FIXED:
        assert len(plans) == 1 and not replanned
    else:
        assert len(plans) >= 2, 'a window of a second plan is persisted before the failure'
        assert any(event.shares for event in replanned)
    job.finish()
    assert differences(reference(*FLAGS, *capacity), read_digest(job)) == []
    assert len(job.events_of(Recovered)) == 1


def test_auto_window_follows_a_throttled_holder_and_recovers(
    cluster: Make, reference: Reference
) -> None:
    """From 1 to what the rate demands, with a log that has room for it; exact, as ever."""
    flags = [*FLAGS[:-1], '180']
    job = cluster(*flags, 'max_wait=0.1', 'reorder_fraction=1', 'cpu_share=0')
    sizes: set[int] = set()

    def look(workers: list, start: object) -> None:
        for path in job.node_memory(0).rglob('upstream-log'):
            with suppress(FileNotFoundError):
                sizes.add(path.stat().st_size)

    mutation = 'mutations.protection:holders_of_rank_1_are_slow_for_a_while'
    assert job.survive(fault=look, mutation=mutation, timeout_s=600.0) == {}
    windows = [event.window for event in job.events_of(Replanned)]
    assert (windows[0], windows[-1]) == (1, 1) and max(windows) > 2, windows
    assert len(sizes) > 1, 'the log has grown'
    assert differences(reference(*flags), read_digest(job)) == []
