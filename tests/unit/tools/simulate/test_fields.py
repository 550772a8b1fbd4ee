# SPDX-License-Identifier: Apache-2.0
"""A field that breaks its rule is named, whatever it describes."""

import math
from dataclasses import is_dataclass, replace
from typing import Any

import msgspec
import pytest

from tests.support.each import each
from tools.plan.layout import Batch, Layout, Precision
from tools.plan.model import LatentAttention, ModelShape
from tools.plan.planning import FailureRate, Job, ProtectionSettings
from tools.plan.presets import CLUSTERS
from tools.simulate.closed_form import Dense, Sparse
from tools.simulate.experts import PartialExperts
from tools.simulate.failures import Correlated, Renewal
from tools.simulate.fields import FieldError
from tools.simulate.monte_carlo import Spares
from tools.simulate.profile import OperatorProfile
from tools.simulate.runs import Pipeline

MODEL = ModelShape('tiny', 2, 8, 2, 100, ffn_hidden_size=16, experts=4, top_k=2,
                   expert_hidden_size=5, shared_hidden_size=3, moe_layers=(0, 1))  # fmt: skip
NOTHING: tuple[float, ...] = (-1, math.nan)
RULES: list[tuple[Any, dict[str, tuple[Any, ...]]]] = [
    (Dense(1.0, 1), {
        'iteration_s': (0.0, math.inf, *NOTHING), 'interval': (0, 1.5), 'overhead_s': NOTHING,
        'stall_s': (math.inf, *NOTHING), 'restart_s': NOTHING, 'mtbf_s': (0.0, *NOTHING),
    }),
    (Sparse(1.0, 2), {
        'iteration_s': (0.0,), 'window': (0, True, 10**12), 'overhead_s': NOTHING,
        'restart_s': NOTHING, 'mtbf_s': (0.0,), 'local_saving': (1.1, math.nan),
        'frozen_saving': (-0.1,), 'frozen_shares': ((0.5,), (0.5, 2.0)),
    }),
    (Renewal(1.0), {'mtbf_s': (0.0,), 'shape': (0.0, 0.001, math.inf)}),
    (Correlated(1.0), {'mtbf_s': (0.0,), 'repeat': (1.0, -0.1), 'neighbours': NOTHING,
                       'repeat_after_s': (0.0,)}),
    (Spares(), {'count': (-1, 0.5), 'repair_s': NOTHING}),
    (PartialExperts(4, 2), {
        'experts': (0,), 'saved': (0, 5), 'selection': ('any',), 'lost_budget': (0.0,),
        'expert_bytes': (1.1,), 'hidden_s': NOTHING,
    }),
    (OperatorProfile('x', 2, 1), {'full_bytes': (-1, 1.5), 'weight_bytes': (-1, 3),
                                  'tokens': NOTHING}),
    (Pipeline(4, 2), {'nodes': (0,), 'stages': (0, 3), 'micro_batches': (0,), 'copies': (0, 3)}),
    (Batch(), {'sequence_length': (0,), 'micro_batch_size': (0,), 'global_batch_size': (0,)}),
    (Layout(8, pipeline=2), {
        'ranks': (0, 9), 'pipeline': (0,), 'context': (0,), 'expert': (0, 3, 8),
        'expert_tensor': (0,), 'layers_per_stage': ((1,), (1, -1)),
    }),
    (Layout(8, pipeline=2, layers_per_stage=(1, 1)), {'chunks': (0, 2)}),
    (Precision(), {
        'master': ('int8',), 'second_moment': ('int8',), 'boundary': ('',), 'amax_history': (-1,),
    }),
    (Precision(master='fp16'), {'compute': ('fp32',)}),
    (MODEL, {
        'layers': (0, 10**12), 'hidden_size': (10**12,), 'attention_heads': (3,), 'top_k': (0, 5),
        'moe_layers': ((1,), (1, 2)), 'ffn_hidden_size': (0,), 'expert_hidden_size': (0,),
        'vocab_size': (1.5,), 'query_groups': (0,), 'learned_positions': (-1,),
    }),
    (msgspec.structs.replace(MODEL, experts=10_000, expert_hidden_size=2**22),
     {'hidden_size': (2**22,)}),
    (CLUSTERS['a100'], {'gpus_per_node': (0,), 'copy_bytes_per_s': (0, math.inf),
                        'host_memory_bytes': (-1,), 'peak_flops': (0,)}),
    (ProtectionSettings(), {
        'window': (0, 10**12), 'max_window': (0, 10**12), 'replicas': (-1,), 'log_lag': NOTHING,
        'network_share': (0, 1.1), 'network_gb_per_s': (0.001,), 'hidden_fraction': (0, 1.1),
    }),
    (FailureRate(), {'mtbf_s': (0,), 'restart_s': NOTHING, 'local_saving': (2,)}),
    (Job(MODEL, Layout(1), Batch(), CLUSTERS['a100'], 1.0), {'iteration_s': (0, -1),
                                                            'overhead_s': NOTHING}),
]  # fmt: skip


@each('given, field, value', [(given, field, value) for given, fields in RULES
                              for field, values in fields.items() for value in values])  # fmt: skip
def test_a_field_that_breaks_its_rule_is_named(given: Any, field: str, value: Any) -> None:
    change = replace if is_dataclass(given) else msgspec.structs.replace
    with pytest.raises(FieldError, match=rf'^{field}: is ') as raised:
        change(given, **{field: value})
    assert raised.value.field == field


def test_fields_of_a_part_are_named_with_it() -> None:
    with pytest.raises(FieldError, match=r'^latent\.kv_rank: is 0'):
        LatentAttention(0, 1, 1, 1)
    with pytest.raises(FieldError, match=r'^latent\.query_rank: is -1'):
        LatentAttention(1, 1, 1, 1, -1)
