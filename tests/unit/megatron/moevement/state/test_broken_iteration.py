# SPDX-License-Identifier: Apache-2.0
"""What an interrupted iteration has accumulated or put aside is gone before the next one."""

import queue
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.timers import Timers
from megatron.training import global_vars
from torch.distributed.checkpoint.api import _is_wrapped_exception

from megatron.moevement.state import broken_iteration
from megatron.moevement.state.broken_iteration import BrokenIteration, drop_put_aside
from tests.stand_ins.grouped_linear import GroupedLinear


def test_seconds_before_a_failure_count_in_the_next_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream divides them by all iterations since the last one."""
    timers = Timers(0, 'minmax')
    monkeypatch.setattr(global_vars, '_GLOBAL_TIMERS', timers)
    monkeypatch.setattr(broken_iteration, 'get_model_config', MagicMock())
    monkeypatch.setattr(broken_iteration, 'drop_put_aside', MagicMock())
    timers('interval-time', log_level=0).start()
    timers('interval-time')._start_time -= 1000
    broken = BrokenIteration([MagicMock()], {})
    broken.note_start()
    broken.reset_loop_state()
    timers('interval-time').start()
    assert 1000 <= timers('interval-time').elapsed() < 2000


def layer() -> GroupedLinear:
    return GroupedLinear(
        2,
        4,
        3,
        init_method=torch.nn.init.ones_,
        params_dtype=torch.float32,
        delay_wgrad_compute=True,
    )


class FusedExperts(torch.nn.Module):
    """As upstream's experts, whose fused layers are not in the tree of modules."""

    def __init__(self, fused: GroupedLinear) -> None:
        super().__init__()
        self._fused_ops = (torch.nn.Sequential(fused),)


def gradient(one: GroupedLinear, value: float) -> torch.Tensor:
    """The gradient of the first weight after a backward pass with such tokens."""
    one(torch.full((5, 4), value), [2, 3]).sum().backward()
    one.backward_dw()
    (first, _) = one.parameters()
    assert first.grad is not None
    return first.grad.clone()


@pytest.mark.parametrize('module', [lambda one: one, FusedExperts])
def test_later_weight_gradients_are_of_their_own_pass(module: Any) -> None:
    one = layer()
    one(torch.full((5, 4), 7.0), [2, 3]).sum().backward()  # interrupted before `backward_dw`
    drop_put_aside([module(one)])
    assert torch.equal(gradient(one, 2.0), gradient(layer(), 2.0))


def test_deferred_gradients_of_the_output_layer_are_dropped() -> None:
    output = torch.nn.Linear(2, 2)
    output.embedding_activation_buffer, output.grad_output_buffer = [1, 2], [3]
    drop_put_aside([output])
    assert output.embedding_activation_buffer == output.grad_output_buffer == []


def test_scales_for_recomputations_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    stashes, firsts = [deque(['old']), deque()], [True]
    manager = SimpleNamespace(
        quantization_state=SimpleNamespace(fp8_tensors_recompute_buffer=stashes)
    )
    context = SimpleNamespace(_is_first_fp8_module=firsts)
    for name, part in (
        ('quantization', SimpleNamespace(FP8GlobalStateManager=manager)),
        ('distributed', SimpleNamespace(activation_recompute_forward=context)),
    ):
        monkeypatch.setitem(sys.modules, f'transformer_engine.pytorch.{name}', part)
    drop_put_aside([])
    assert stashes == [deque(), deque()] and firsts == []


def write(folder: Path) -> filesystem_async.FileSystemWriterAsync:
    """A dense save of this rank, until it waits for the others; without a folder writing fails."""
    writer = filesystem_async.FileSystemWriterAsync(folder)
    writer.write_buckets = [(folder / 'shards', 'shards', ([], []))]
    writer.results_queue = filesystem_async.get_write_results_queue()
    writer.write_preloaded_data_multithread(
        [], False, 0, writer.write_buckets, writer.results_queue
    )
    return writer


def test_save_after_an_interrupted_one_has_its_own_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(filesystem_async, '_results_queue', queue.Queue())
    write(tmp_path)  # interrupted
    drop_put_aside([])
    failed = write(tmp_path / 'missing')
    assert _is_wrapped_exception(failed.retrieve_write_results())
    assert write(tmp_path).retrieve_write_results() == []


def test_process_with_results_of_saves_may_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def empty(self) -> bool:
            raise ConnectionRefusedError

    monkeypatch.setattr(filesystem_async, '_results_queue', Gone())
    drop_put_aside([])
