# SPDX-License-Identifier: Apache-2.0
"""Upstream's exchange between stages, and its waits for the device."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.model_parallel_config import ModelParallelConfig

from megatron.moevement.seams.p2p import BoundaryCommunicator, receives_per_iteration
from moevement_ext.memory.upstream_log.record import Direction

NOTHING = {
    'tensor_send_next': None,
    'tensor_send_prev': None,
    'recv_prev': False,
    'recv_next': False,
    'tensor_shape': (1,),
}


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    waits: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append('stream'))
    monkeypatch.setattr(torch.cuda, 'current_stream', lambda: stream)
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda: waits.append('device'))
    return waits


@pytest.mark.parametrize(
    ('batched', 'waiting', 'expected'),
    [(True, True, ['stream']), (True, False, []), (False, True, [])],
)
def test_exchange_waits_for_its_stream_instead_of_the_device(
    waits: list[str],
    one_rank: torch.distributed.ProcessGroup,
    batched: bool,
    waiting: bool,
    expected: list[str],
) -> None:
    config = ModelParallelConfig(batch_p2p_comm=batched, batch_p2p_sync=waiting)
    before = vars(config).copy()
    communicator = BoundaryCommunicator(one_rank, config, None)
    communicator._communicate(**NOTHING)
    assert waits == expected
    assert vars(config) == before, 'others share it'
    config.timers = lambda name: name  # as upstream's loop sets them later
    assert communicator.config.timers is config.timers


def test_replayed_tensor_is_awaited_on_the_stream_that_uses_it(
    monkeypatch: pytest.MonkeyPatch, one_rank: torch.distributed.ProcessGroup
) -> None:
    """A schedule may receive on another stream than it computes on."""
    done: list[str] = []

    class Event:
        def record(self) -> None:
            done.append('copied')

        def wait(self) -> None:
            done.append('waited')

    monkeypatch.setattr(torch.cuda, 'Event', Event)
    communicator = BoundaryCommunicator(one_rank, ModelParallelConfig(), None)
    communicator.at_iteration(1)
    logged = SimpleNamespace(take=lambda iteration, sequence: torch.ones(2))
    with communicator.replaying({Direction.DOWN: logged}):
        given = {**NOTHING, 'recv_prev': True, 'tensor_send_next': torch.ones(2)}
        received, _, requests = communicator._communicate(**given, wait_on_reqs=False)
    assert torch.equal(received, torch.ones(2)) and received.requires_grad
    assert requests.keys() == {'recv_prev', 'send_next'}
    requests['send_next'].wait()
    assert done == ['copied']
    requests['recv_prev'].wait()
    assert done == ['copied', 'waited']


@pytest.mark.parametrize('stages', [1, 2, 3, 4])
@pytest.mark.parametrize('chunks', [1, 2, 3])
def test_receive_counts_match_the_sends_of_the_neighbours(stages: int, chunks: int) -> None:
    """Model chunks are assigned to stages in turn; each passes all micro-batches both ways."""
    parts = [part % stages for part in range(stages * chunks)]
    micro_batches = 5
    for stage in range(stages):
        received = receives_per_iteration(stage, stages, chunks, micro_batches)
        assert received == {
            Direction.DOWN: micro_batches * parts[1:].count(stage),
            Direction.UP: micro_batches * parts[:-1].count(stage),
        }
