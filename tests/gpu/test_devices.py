# SPDX-License-Identifier: Apache-2.0
"""The real library on a real GPU, of which nothing is expected but that it is sound."""

import pytest
import torch

from moevement_ext.system import nvml

pytestmark = pytest.mark.gpu


@pytest.mark.nvml
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_device_reports_its_state() -> None:
    pytest.importorskip('pynvml', reason='needs nvidia-ml-py')
    uuid = f'GPU-{torch.cuda.get_device_properties(0).uuid}'
    source = nvml.of_one(uuid)
    assert source is not None
    assert source.read() == []
    everywhere = nvml.of_this_node()
    assert everywhere is not None
    assert uuid in everywhere._handles
