# SPDX-License-Identifier: Apache-2.0
"""What another layout reads of the windows, and from where."""

import dataclasses

import numpy as np
import pytest

from tools.plan.layout import Batch, Layout
from tools.plan.model import ModelShape
from tools.plan.moving import _parts, moved
from tools.plan.planning import Job, JobPlan, ProtectionSettings, plan_job
from tools.plan.presets import Cluster
from tools.simulate.fields import FieldError

NETWORK = 1e6
CLUSTER = Cluster('two', 2, 1e12, 1e12, NETWORK, 1e12, 1e12)
MODEL = ModelShape(
    name='small', layers=4, hidden_size=16, attention_heads=2, vocab_size=128, ffn_hidden_size=16,
    experts=8, top_k=2, expert_hidden_size=16, moe_layers=(1, 1, 1, 1),
)  # fmt: skip
LAYOUTS = [
    Layout(4, pipeline=2, expert=2),
    Layout(2, expert=2),
    Layout(8, pipeline=2, expert=4),
    Layout(4, expert=4),
    Layout(3),
    Layout(4, pipeline=2, chunks=2),
    Layout(4, distributed_optimizer=False),
]


def planned(layout: Layout) -> JobPlan:
    job = Job(MODEL, layout, Batch(16, 1, 24), CLUSTER, 1.0, protection=ProtectionSettings(1))
    return plan_job(job)


@pytest.mark.parametrize('after', LAYOUTS, ids=str)
@pytest.mark.parametrize('before', LAYOUTS, ids=str)
def test_node_receives_the_parts_that_its_ranks_lacked(before: Layout, after: Layout) -> None:
    """Counted byte by byte."""
    old, new = planned(before), planned(after)
    remote = read = 0
    had, wanted = _parts(old), _parts(new)
    assert had.keys() == wanted.keys()
    for key, parts in wanted.items():
        for rank, begin, end in parts:
            here = np.zeros(end - begin, bool)
            for other, first, last in had[key]:
                if other // old.job.ranks_per_node == rank // new.job.ranks_per_node:
                    here[max(first - begin, 0) : max(last - begin, 0)] = True
            remote += int((~here).sum())
            read += end - begin
    found = moved(old, new)
    assert (found.remote_bytes, found.read_bytes) == (remote, read)
    assert found.busiest_bytes <= remote
    assert found.seconds == found.busiest_bytes / NETWORK


@pytest.mark.parametrize('layout', LAYOUTS, ids=str)
def test_the_same_layout_moves_nothing(layout: Layout) -> None:
    plan = planned(layout)
    found = moved(plan, plan)
    copies = 1 if layout.distributed_optimizer else layout.data
    assert (found.remote_bytes, found.seconds) == (0, 0)
    assert found.read_bytes == found.state_bytes * copies
    assert found.state_bytes == 12 * MODEL.total_parameters


def test_new_node_receives_all_parts_from_other_nodes() -> None:
    one = dataclasses.replace(LAYOUTS[3], ranks=2, expert=2)
    found = moved(planned(one), planned(LAYOUTS[3]))
    assert (
        found.remote_bytes == found.busiest_bytes == pytest.approx(found.state_bytes / 2, rel=0.1)
    )


def test_another_division_of_tensors_is_refused() -> None:
    with pytest.raises(FieldError, match='divide tensors by 1'):
        moved(planned(LAYOUTS[1]), planned(Layout(2, tensor=2, expert=1)))
