# SPDX-License-Identifier: Apache-2.0
"""A training thread that waits for its GPU is seen to wait for others, by another thread."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moevement_ext.membership.training_thread import TrainingThread
from moevement_ext.regroup import nccl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device'),
]

BUSY_CYCLES = 10**9
"""Keeps a stream busy for about half a second: longer than anything the host does meanwhile."""
DEADLINE_S = 30.0


@pytest.fixture
def watching() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.mark.parametrize('of_its_own', [False, True])
def test_thread_with_queued_work_waits_for_other_ranks(
    of_its_own: bool, watching: ThreadPoolExecutor
) -> None:
    torch.zeros(1, device='cuda')
    stream = torch.cuda.Stream() if of_its_own else torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        thread = TrainingThread()

        def waits() -> bool:
            return watching.submit(thread.probe).result(DEADLINE_S).waits_for_others

        stream.synchronize()
        assert not waits()
        torch.cuda._sleep(BUSY_CYCLES)
        assert waits()
        stream.synchronize()
        assert not waits()


def test_recording_survives_a_probe(watching: ThreadPoolExecutor) -> None:
    factor = torch.ones(8, device='cuda')
    thread = TrainingThread()
    factor * 2  # what is recorded has run before
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = factor * 2
        watching.submit(thread.probe).result(DEADLINE_S)
    graph.replay()
    assert torch.equal(doubled.cpu(), torch.full((8,), 2.0))


def test_groups_of_calls_that_a_backward_pass_left_open_are_closed() -> None:
    """Gradients are computed on another thread."""
    calls, device = nccl.Nccl(), torch.device('cuda', torch.cuda.current_device())
    torch.zeros(1, device=device)
    threads, ended = [], []

    def open_group() -> None:
        threads.append(threading.get_ident())
        assert calls._library.ncclGroupStart() == 0

    nccl._on_gradient_thread(device, open_group)
    calls.end_calls()
    nccl._on_gradient_thread(device, lambda: ended.append(calls._library.ncclGroupEnd()))
    assert threads != [threading.get_ident()]
    assert ended == [nccl._NOT_IN_A_GROUP]
