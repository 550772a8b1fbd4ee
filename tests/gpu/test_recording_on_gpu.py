# SPDX-License-Identifier: Apache-2.0
"""A CUDA graph is recorded while a slot is copied: upstream records its passes during training."""

import threading
from collections.abc import Iterator

import pytest
import torch

from moevement_ext.capture.copier import Copier
from moevement_ext.capture.layout import _Copy, in_pieces

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device'),
]

ELEMENTS = 64 * 2**20
DEADLINE_S = 30.0


@pytest.fixture
def copier() -> Iterator[Copier]:
    made = Copier(torch.device('cuda'))
    yield made
    made.stop()


def test_recording_survives_concurrent_copies(copier: Copier) -> None:
    source = torch.arange(ELEMENTS, dtype=torch.float32, device='cuda')
    target = torch.empty(ELEMENTS, pin_memory=True)
    factor = torch.ones(1024, device='cuda')
    recording, sealed = threading.Event(), threading.Event()
    errors: list[Exception] = []

    def stable() -> list:
        assert recording.wait(DEADLINE_S)  # on the copying thread: all of it happens meanwhile
        return in_pieces([_Copy(target, source)])

    copier.start([], stable, sealed.set, errors.append)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        factor * 2  # what is recorded has run before
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recording.set()
        doubled = factor * 2
        assert sealed.wait(DEADLINE_S)
    copier.wait()
    graph.replay()
    assert not errors
    assert torch.equal(doubled.cpu(), torch.full((1024,), 2.0))
    assert torch.equal(target, source.cpu())
