# SPDX-License-Identifier: Apache-2.0
"""State that an interrupted iteration accumulates into is rolled back."""

from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from megatron.moevement.seams import cpu_device

cpu_device.install()

from megatron.core.timers import Timers  # noqa: E402
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker  # noqa: E402
from megatron.training import global_vars  # noqa: E402

from megatron.moevement.job.megatron_loop import MegatronLoop  # noqa: E402
from megatron.moevement.job.session import Session  # noqa: E402
from megatron.moevement.state import broken_iteration  # noqa: E402
from megatron.moevement.state.broken_iteration import BrokenIteration  # noqa: E402
from megatron.moevement.state.model_operators import Operator  # noqa: E402


@pytest.fixture
def losses() -> Iterator[torch.Tensor]:
    """The loss that upstream has accumulated, by layer."""
    tracker = get_moe_metrics_tracker()
    tracker.metrics.clear()
    tracker.record('load_balancing_loss', torch.tensor(3.0), layer_number=1, num_layers=2)
    yield tracker.metrics['load_balancing_loss'].values
    tracker.metrics.clear()


def test_buffers_of_all_dtypes_and_metrics_are_rolled_back(losses: torch.Tensor) -> None:
    buffers = {
        'bias': torch.tensor([0.5, -0.0]),
        'counts': torch.tensor([7, 8, 9]),
        'half': torch.ones(3, dtype=torch.bfloat16),
    }
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    broken = BrokenIteration([], {'router': Operator('router', 'router', {}, buffers)})
    for _ in range(2):
        broken.begin()
        for tensor in (*buffers.values(), losses):
            tensor.add_(1)
        broken.roll_back()
        assert losses.tolist() == [3.0, 0.0]
        assert all(torch.equal(buffers[name], before[name]) for name in buffers)


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


class Chunk(torch.nn.Module):
    """A chunk in Megatron's wrapper, of which a loop can change functions, modes and hooks."""

    bucket_groups = expert_parallel_bucket_groups = ()

    def __init__(self, function: str | None, hooked: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.frozen, self.trained = torch.nn.Dropout(), torch.nn.Dropout()
        self.remove_forward_pre_hook_handles = {'module': 'hook'} if hooked else {}
        self.sync(function)

    def sync(self, value: str | None) -> None:
        """Set all three functions of the configuration."""
        names = ('no_sync_func', 'grad_sync_func', 'param_sync_func')
        vars(self.config).update(dict.fromkeys(names, value))

    def enable_forward_pre_hook(self) -> None:
        assert not self.remove_forward_pre_hook_handles
        self.remove_forward_pre_hook_handles = {'module': 'hook'}

    def disable_forward_pre_hook(self, param_sync: bool) -> None:
        assert self.remove_forward_pre_hook_handles and not param_sync
        self.remove_forward_pre_hook_handles = {}

    def found(self) -> list[object]:
        """What a process enters the loop with."""
        modes = [module.training for module in self.modules()]
        return [*vars(self.config).values(), *modes, bool(self.remove_forward_pre_hook_handles)]


@pytest.mark.parametrize('function', ['set-up', None], ids=['custom', 'upstream'])
@pytest.mark.parametrize('hooked', [False, True])
def test_survivor_enters_the_loop_with_what_a_new_process_has(
    function: str | None, hooked: bool
) -> None:
    """Other functions or hooks would reduce in another order than the new process."""
    chunk = Chunk(function, hooked)
    chunk.frozen.eval()
    broken = BrokenIteration([chunk], {})
    around: Any = SimpleNamespace(
        data=None, operations=None, post_step=SimpleNamespace(reset_loop_state=lambda: None)
    )
    session = Session.__new__(Session)
    session.alone = ExitStack()
    session.job = SimpleNamespace(train=lambda run: run())  # type: ignore[assignment]
    session._trainer = SimpleNamespace(  # type: ignore[assignment]
        loop=MegatronLoop(SimpleNamespace(), SimpleNamespace(), around, broken)  # type: ignore[arg-type]
    )

    def loop() -> list[object]:
        found = chunk.found()
        chunk.sync('loop')
        chunk.eval()
        if hooked:
            chunk.disable_forward_pre_hook(param_sync=False)
        else:
            chunk.enable_forward_pre_hook()
        return found

    before = session.train(loop)
    session._trainer.loop.leave()
    assert chunk.found() == before
