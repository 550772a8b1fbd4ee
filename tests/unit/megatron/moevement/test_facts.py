# SPDX-License-Identifier: Apache-2.0
"""Facts of a job that are worked out of upstream's arguments."""

from argparse import Namespace

import pytest
import torch

from megatron.moevement.facts import facts_of
from tests.unit.megatron.moevement.job.test_identity import parsed


@pytest.fixture
def args() -> Namespace:
    """Arguments after upstream's validation."""
    args = parsed()
    vars(args).update(
        rank=1,
        world_size=4,
        data_parallel_size=2,
        params_dtype=torch.bfloat16,
        distributed_timeout_minutes=5,
        save='checkpoints',
        save_interval=10,
    )
    return args


def test_largest_batch_of_a_growing_schedule_counts(args: Namespace) -> None:
    args.global_batch_size, args.step_batch_size_schedule = 4, '0:4, 1M:12 2M:8'
    assert facts_of(args).global_batch_size == 12


def test_replicas_are_no_source_if_each_draws_numbers_of_its_own(args: Namespace) -> None:
    assert facts_of(args).copies_from_peers
    args.mtp_hsm = True  # megatron-core 0.20
    assert not facts_of(args).copies_from_peers


@pytest.mark.parametrize(('in_fp32', 'dtype'), [(False, torch.bfloat16), (True, torch.float32)])
def test_boundary_dtype_is_that_of_the_residual_connection(
    in_fp32: bool, dtype: torch.dtype, args: Namespace
) -> None:
    args.fp32_residual_connection = in_fp32
    assert facts_of(args).boundary_dtype is dtype
