# SPDX-License-Identifier: Apache-2.0
"""What upstream does in other installations, so far as it can be had without them."""

from typing import Any

from megatron.core.optimizer import clip_grads


def norm_as_tensor() -> None:
    """With Transformer Engine 2.14 and later the gradient norm stays on the device."""

    def scale(chunk_size: int, overflow: Any, tensors: list, coefficient: Any) -> None:
        for source, target in zip(*tensors, strict=True):
            target.copy_(source * coefficient)

    clip_grads.multi_tensor_scale_tensor_impl = scale
