# SPDX-License-Identifier: Apache-2.0
import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.memory.tensors import copy_all, decoded, encoded, in_batches

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8)


def test_copies_have_the_bits_of_their_sources() -> None:
    """Including NaNs, denormal numbers and negative zeros, whatever else is in the batch."""
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (8 * 1000,), dtype=torch.uint8, generator=generator)
    sources = [(raw % 2 if dtype is torch.bool else raw).view(dtype) for dtype in DTYPES]
    targets = [torch.zeros_like(source) for source in sources]
    one_by_one = [torch.zeros_like(source) for source in sources]
    copy_all(targets, sources)
    for target, source, other in zip(targets, sources, one_by_one, strict=True):
        other.copy_(source)
        assert torch.equal(target.view(torch.uint8), source.view(torch.uint8))
        assert torch.equal(target.view(torch.uint8), other.view(torch.uint8))


def test_empty_batch_is_accepted_and_wrong_shape_refused() -> None:
    copy_all([], [])
    with pytest.raises(RuntimeError):
        copy_all([torch.zeros(3)], [torch.zeros(4)])


@given(sizes=st.lists(st.integers(0, 10)), limit=st.integers(10, 30))
def test_batches_are_as_large_as_the_limit_permits(sizes: list[int], limit: int) -> None:
    batches = list(in_batches(sizes, lambda size: size, limit))
    assert [size for batch in batches for size in batch] == sizes
    assert all(batch and sum(batch) <= limit for batch in batches)
    assert all(sum(one) + two[0] > limit for one, two in zip(batches, batches[1:], strict=False))


@pytest.mark.parametrize(
    'tensor',
    [
        torch.tensor(1.5),
        torch.randn(2, 3).to(torch.bfloat16),
        torch.tensor([[True, False]]),
        torch.empty(0, dtype=torch.int64),
        torch.arange(12).view(3, 4).t(),
    ],
)
def test_values_keep_type_shape_and_bits(tensor: torch.Tensor) -> None:
    content = msgspec.msgpack.encode({'one': tensor}, enc_hook=encoded)
    again = msgspec.msgpack.decode(content, type=dict[str, torch.Tensor], ext_hook=decoded)['one']
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(again, tensor)
