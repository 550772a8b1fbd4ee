# SPDX-License-Identifier: Apache-2.0
"""Which flags leave a failure to the restart of the whole job, and that the reason names them."""

from argparse import Namespace
from typing import Any

import pytest

from megatron.moevement.job.unsupported import not_localized
from tests.unit.megatron.moevement.job.test_identity import parsed


@pytest.fixture
def args() -> Namespace:
    """Flags that leave nothing to the whole job."""
    args = parsed()
    args.distributed_backend = 'gloo'
    args.variable_seq_lengths = False  # upstream's validation adds it
    return args


@pytest.mark.parametrize(
    ('settings', 'named'),
    [
        ({'moe_input_jitter_eps': 0.1, 'eval_interval': 4, 'eval_iters': 1}, '--moe-input-jitter'),
        ({'check_weight_hash_across_dp_replicas_interval': 5}, '--check-weight-hash'),
        ({'gpu_sniff_test_interval': 5}, '--gpu-sniff-test-interval'),
        ({'moe_routing_trace_path': 'trace'}, '--moe-routing-trace-path'),
        ({'async_save': True}, '--async-save'),
        ({'mtp_num_layers': 1}, '--mtp-num-layers'),
    ],
)
def test_what_a_stage_alone_cannot_do_again_is_named(
    settings: dict[str, Any], named: str, args: Namespace
) -> None:
    assert not_localized(args) is None
    vars(args).update(settings)
    reason = not_localized(args)
    assert reason is not None and named in reason


def test_jitter_without_evaluations_is_replayed(args: Namespace) -> None:
    vars(args).update(moe_input_jitter_eps=0.1, eval_interval=4, eval_iters=0)
    assert not_localized(args) is None
