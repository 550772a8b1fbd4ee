# SPDX-License-Identifier: Apache-2.0
"""What torch compiles does not depend on earlier inputs of the process."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch._dynamo as dynamo
import torch._dynamo.config as dynamo_config
import torch._inductor.config as inductor_config
from torch._dynamo.testing import CompileCounter
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties, ReductionHint

from megatron.moevement.seams.compiled import make_repeatable

VARIANTS = 20
"""Input variants of one function; torch's own limit is 8."""


@contextmanager
def repeatable(deterministic: bool) -> Iterator[None]:
    with (
        dynamo_config.patch(recompile_limit=dynamo_config.recompile_limit),
        inductor_config.patch(inductor_config.get_config_copy()),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.delenv('TORCHDYNAMO_DISABLE', raising=False)
        make_repeatable(deterministic, warns=False)
        yield


def compilations() -> int:
    """Number of compiled variants of a function."""
    counter = CompileCounter()
    compiled = torch.compile(lambda tensor, number: tensor * 2 + number, backend=counter)
    with dynamo_config.patch(disable=False):
        dynamo.reset()
        for variant in range(VARIANTS):
            compiled(torch.ones([1] * (variant + 1)), 1.0)
        dynamo.reset()
    return counter.frame_count


@pytest.mark.parametrize('deterministic', [True, False])
def test_every_variant_of_a_function_is_compiled(deterministic: bool) -> None:
    assert compilations() < VARIANTS, 'torch has a limit'
    with repeatable(deterministic):
        assert compilations() == VARIANTS


def kernels(columns: int, rows: int) -> list[object]:
    """Configurations of torch's sum over the columns of `rows` rows on an H100."""
    device = DeviceProperties(
        type='cuda',
        index=0,
        multi_processor_count=132,
        cc=90,
        major=9,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
    )
    meta = {
        'reduction_hint': ReductionHint.INNER,
        'num_load': 4,
        'num_store': 2,
        'num_reduction': 1,
        'deterministic': inductor_config.deterministic,
        'batch_invariant': getattr(inductor_config, 'batch_invariant', False),
    }
    if inductor_config.triton.persistent_reductions and columns <= 1024:
        found = triton_heuristics._persistent_reduction_configs(
            {'x': rows, 'r0_': columns},
            reduction_hint=ReductionHint.INNER,
            inductor_meta=meta,
            triton_meta={'device': device},
        )
    else:
        found = triton_heuristics._reduction_configs(
            size_hints={'x': rows, 'r0_': triton_heuristics.next_power_of_2(columns)},
            inductor_meta=meta,
            triton_meta={'device': device},
        )
    return [(config.kwargs, config.num_warps) for config in found]


@pytest.mark.parametrize('columns', [256, 512, 768, 1024, 1408, 2048, 5632])
def test_gpu_sum_is_split_equally_for_any_number_of_rows(columns: int) -> None:
    with repeatable(deterministic=True):
        few, many = kernels(columns, 64), kernels(columns, 65536)
    assert few == many and len(few) == 1


@pytest.mark.parametrize('deterministic', [True, False])
def test_missing_deterministic_mode_causes_a_warning(
    deterministic: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with repeatable(deterministic):
        make_repeatable(deterministic, warns=True)
    assert ('without --deterministic-mode' in caplog.text) is not deterministic
