# SPDX-License-Identifier: Apache-2.0
"""Host memory and log are those that the training reserves."""

from datetime import timedelta

import pytest
import torch

from megatron.moevement.facts import JobFacts
from megatron.moevement.seams import p2p
from tools.lab.fields import FieldError
from tools.model.layout import Batch, Layout, Precision
from tools.model.shape import ModelShape
from tools.plan import memory

MODEL = ModelShape('m', 8, 64, 4, 128, ffn_hidden_size=64)


@pytest.mark.parametrize('stage', [0, 1, 3])
@pytest.mark.parametrize('chunks', [1, 2])
@pytest.mark.parametrize('sequence_parallel', [False, True])
def test_log_has_the_size_of_the_training(monkeypatch, stage, chunks, sequence_parallel):
    layout = Layout(32, pipeline=4, tensor=2, chunks=chunks, sequence_parallel=sequence_parallel)
    batch = Batch(sequence_length=48, micro_batch_size=3, global_batch_size=24)
    facts = JobFacts(
        rank=0, world_size=32, data_parallel_size=layout.data, tensor_model_parallel_size=2,
        pipeline_model_parallel_size=4, context_parallel_size=1,
        sequence_parallel=sequence_parallel, distributed_backend='gloo', timeout=timedelta(),
        use_distributed_optimizer=True, micro_batch_size=3, global_batch_size=24, seq_length=48,
        hidden_size=64, params_dtype=torch.bfloat16, fp32_residual_connection=False, log_interval=1,
    )  # fmt: skip
    monkeypatch.setattr(
        p2p.parallel_state, 'get_pipeline_model_parallel_rank', lambda: stage, raising=True
    )
    expected = p2p.logged_per_iteration(facts, chunks)
    found = memory.logged_per_iteration(MODEL, layout, batch, Precision(), stage)
    assert found == expected and found.iteration_bytes > found.record_bytes > 0


def test_instances_of_the_optimizer_share_nothing_but_have_equal_shards():
    layout = Layout(16, pipeline=2, expert=2, instances=2)
    assert layout.families() == [0, 1, 2, 3, 0, 1, 2, 3, 8, 9, 10, 11, 8, 9, 10, 11]
    assert Layout(4).families() == [0, 1, 2, 3]
    with pytest.raises(FieldError, match='instances'):
        Layout(8, expert=4, instances=4)
    with pytest.raises(FieldError, match='distributed optimizer'):
        Layout(8, instances=2, distributed_optimizer=False)
