# SPDX-License-Identifier: Apache-2.0
"""Plans of whole jobs have the limits of the training."""

from types import SimpleNamespace

from msgspec.structs import replace

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.events import EventLog
from moevement_ext.plan.strategy.moevement import Measured
from moevement_ext.protect.protection import Reserved
from moevement_ext.protect.statistics import CaptureStatistics
from tools.model.description import Cluster
from tools.model.layout import Batch, Layout
from tools.model.shape import ModelShape
from tools.plan import report
from tools.plan.planning import FailureRate, Job, ProtectionSettings, hidden_budgets, plan_job

MODEL = ModelShape('tiny', layers=4, hidden_size=64, attention_heads=4, vocab_size=256,
                   experts=8, top_k=2, expert_hidden_size=128)  # fmt: skip
CLUSTER = Cluster('small', gpus_per_node=2, gpu_memory_bytes=1e9, copy_bytes_per_s=2.5e6,
                  network_bytes_per_s=40e6, host_memory_bytes=1e9, peak_flops=1e12)  # fmt: skip
JOB = Job(
    MODEL,
    Layout(8, pipeline=2, expert=2),
    Batch(16, 1, 16),
    CLUSTER,
    iteration_s=0.25,
    protection=ProtectionSettings(max_window=100),
    failures=FailureRate(mtbf_s=3600),
)


def protected(job=JOB, **changes):
    return replace(job, protection=replace(job.protection, **changes))


def on(job=JOB, **changes):
    return replace(job, cluster=replace(job.cluster, **changes))


def test_a_limit_of_the_network_is_that_of_the_training():
    """What training asks for its window, at rates that it has measured."""
    rate = 0.02e9
    link = 8 * rate
    job = protected(on(network_bytes_per_s=link * JOB.ranks_per_node), network_gb_per_s=rate / 1e9)
    config = SparseCheckpointConfig(network_gb_per_s=rate / 1e9)
    asked = []
    training = SimpleNamespace(
        memory=SimpleNamespace(copies=SimpleNamespace(holders=[[1] * job.copies])),
        planner=SimpleNamespace(shortest_window=lambda carried, longest: asked.append(carried)),
        rank=SimpleNamespace(config=config),
        statistics=CaptureStatistics(EventLog(None, 0)),
        _longest=8,
    )
    seen = Measured(job.iteration_s, job.cluster.copy_bytes_per_s, link)
    Reserved._shortest_window(training, seen)
    assert asked == [hidden_budgets(job)]
    assert hidden_budgets(job).network_bytes == rate * job.iteration_s / job.copies
    assert plan_job(job).network_bytes() == rate * job.ranks_per_node * job.iteration_s
    assert job.send_bytes_per_s == rate
    for unlimited in ('auto', 'off', 0):
        free = protected(job, network_gb_per_s=unlimited)
        assert free.send_bytes_per_s == link * free.protection.network_share


def test_auto_takes_no_longer_windows_than_host_memory_has_room_for():
    lag = protected(max_window=50, log_lag=1.0)
    unbound = plan_job(lag)
    assert unbound.window > 3 and unbound.longest == 50
    room = unbound.host_memory(3).node_total
    plan = plan_job(on(lag, host_memory_bytes=room))
    assert (plan.longest, plan.window, plan.fewest) == (3, 3, unbound.fewest)
    assert report.infeasible(plan) is None and plan.host_memory().node_total == room
    told = report.warnings(plan)
    assert any('no room for windows of 50: `auto` takes 3 at most' in text for text in told)
    assert any('find host memory' in text for text in told)
    assert plan_job(on(lag, host_memory_bytes=room - 1)).longest == 2
    assert plan_job(protected(on(host_memory_bytes=room), window=9)).longest == 9
