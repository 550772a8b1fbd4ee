# SPDX-License-Identifier: Apache-2.0
"""Host memory and log are those that the training reserves."""

from datetime import timedelta

import numpy as np
import pytest
import torch

from megatron.moevement.facts import JobFacts
from megatron.moevement.seams import p2p
from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.memory.window.format import PREAMBLE_BYTES
from moevement_ext.plan.byte_planner import OperatorBytes
from moevement_ext.protect import protection
from moevement_ext.replicate import host_memory
from moevement_ext.simulate import memory
from moevement_ext.simulate.layout import Batch, Layout, Precision
from moevement_ext.simulate.model import ModelShape
from moevement_ext.simulate.planning import ProtectionSettings

MODEL = ModelShape('m', 8, 64, 4, 128, ffn_hidden_size=64)


def test_constants_are_those_of_the_training():
    assert memory.GENERATIONS == host_memory.GENERATIONS
    assert memory.LEDGER_RECORDS == host_memory.LEDGER_RECORDS
    assert memory.LATE_ITERATIONS == protection._LATE_ITERATIONS


def test_settings_default_to_those_of_the_training():
    ours, flags = ProtectionSettings(), SparseCheckpointConfig()
    assert (ours.max_window, ours.replicas) == (flags.max_window, flags.replicas)
    assert ours.longest_window == flags.longest_window
    assert (
        ProtectionSettings(window=3).longest_window
        == SparseCheckpointConfig(window=3).longest_window
    )


@pytest.mark.parametrize('stage', [0, 1, 3])
@pytest.mark.parametrize('chunks', [1, 2])
@pytest.mark.parametrize('sequence_parallel', [False, True])
def test_log_is_that_of_the_training(monkeypatch, stage, chunks, sequence_parallel):
    layout = Layout(32, pipeline=4, tensor=2, chunks=chunks, sequence_parallel=sequence_parallel)
    batch = Batch(sequence_length=48, micro_batch_size=3, global_batch_size=24)
    facts = JobFacts(
        rank=0, world_size=32, data_parallel_size=layout.data, tensor_model_parallel_size=2,
        pipeline_model_parallel_size=4, context_parallel_size=1,
        sequence_parallel=sequence_parallel, distributed_backend='gloo', timeout=timedelta(),
        use_distributed_optimizer=True, micro_batch_size=3, global_batch_size=24, seq_length=48,
        hidden_size=64, params_dtype=torch.bfloat16, fp32_residual_connection=False,
        log_interval=1,
    )  # fmt: skip
    monkeypatch.setattr(
        p2p.parallel_state, 'get_pipeline_model_parallel_rank', lambda: stage, raising=True
    )
    expected = p2p.logged_bytes_per_iteration(facts, chunks)
    found = memory.logged_bytes_per_iteration(MODEL, layout, batch, Precision(), stage)
    assert found == expected > 0


def test_one_stage_logs_nothing():
    assert memory.logged_bytes_per_iteration(MODEL, Layout(4), Batch(), Precision(), 0) == 0


def test_window_file_holds_any_plan():
    operators = [OperatorBytes('a', (1280, 0), (128, 0)), OperatorBytes('b', (640, 640), (64, 64))]
    files = memory.window_file_bytes(operators, 3)
    assert files == [PREAMBLE_BYTES + 1920 + 2 * 192, PREAMBLE_BYTES + 640 + 2 * 64]


def test_equal_ranks_hold_as_much_for_others_as_others_for_them():
    files, logs = np.full(8, 1000), np.full(8, 10)
    plan = memory.fullest_node(files, logs, ranks_per_node=2, replicas=2)
    kinds = plan.by_kind()
    assert (kinds['own_windows'], kinds['replicas']) == (2 * 3 * 1000, 2 * 2 * 3 * 1000)
    assert kinds['log_ring'] == 20


def test_the_node_with_the_highest_need_is_found():
    files = np.array([1, 1, 1, 1, 5, 1])
    plan = memory.fullest_node(files, np.zeros(6, dtype=np.int64), ranks_per_node=2, replicas=0)
    assert sorted(plan.ranks) == [4, 5]
    assert plan.by_kind()['replicas'] == 0


def test_one_node_holds_no_replicas():
    plan = memory.fullest_node(np.full(4, 1), np.full(4, 0), ranks_per_node=4, replicas=2)
    assert plan.by_kind()['replicas'] == 0
