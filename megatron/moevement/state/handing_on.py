# SPDX-License-Identifier: Apache-2.0
"""Hands on what an iteration of a rank has accumulated to the rank that continues it.

These are sums of gradients, counts of routers, metrics for upstream's log, losses and random
numbers: all that the next micro-batch of the same rank reads or adds to. The tensors are those of
`BrokenIteration`, and the gradients.
"""

from collections.abc import Callable, Iterable, Mapping

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from megatron.moevement.facts import Chunks
from megatron.moevement.seams import upstream
from megatron.moevement.state import iteration_state
from megatron.moevement.state.iteration_state import RngState
from megatron.moevement.state.model_operators import Operator
from moevement_ext.capture.trainer_state import receive_packed, send_packed
from moevement_ext.memory.tensors import copy_all, decoded, encoded


class Metric(msgspec.Struct, frozen=True):
    """An entry of upstream's tracker without its values; groups have their names upstream."""

    size: int
    reduce_group: str | None
    avg_group: str | None
    needs_dp_avg: bool


class Accumulated(msgspec.Struct, frozen=True, kw_only=True):
    """What the micro-batches so far have left, except tensors."""

    rng: RngState
    metrics: dict[str, Metric]
    losses: list[dict[str, torch.Tensor]]
    """Result of the schedule for each micro-batch."""
    tokens: int | None
    """Number that a loss per token is divided by."""


_ACCUMULATED = msgspec.msgpack.Decoder(Accumulated, ext_hook=decoded)


class Line:
    """Sends to and receives from data-parallel peers, by global rank. Training thread only."""

    def __init__(self) -> None:
        self.group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.ranks: list[int] = torch.distributed.get_process_group_ranks(self.group)
        self.place: int = self.group.rank()
        on_gpu = torch.distributed.get_backend(self.group) == 'nccl'
        self.device = torch.device(torch.cuda.current_device() if on_gpu else 'cpu')

    def send(self, peer: int, message: object) -> None:
        content = msgspec.msgpack.encode(message, enc_hook=encoded)
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        for tensor in (torch.tensor([data.numel()]), data):
            send_packed([tensor], peer, self.group, self.device)

    def receive[T](self, peer: int, decoder: msgspec.msgpack.Decoder[T]) -> T:
        length = torch.zeros(1, dtype=torch.int64)
        receive_packed([length], peer, self.group, self.device)
        data = torch.empty(int(length.item()), dtype=torch.uint8)
        receive_packed([data], peer, self.group, self.device)
        return decoder.decode(data.numpy().tobytes())


class Accumulating:
    """The accumulating tensors of this rank. Training thread only."""

    def __init__(self, model: Chunks, operators: Mapping[str, Operator]) -> None:
        held = [one for chunk in model for one in chunk.buffers + chunk.expert_parallel_buffers]
        self.gradients = [
            tensor for buffer in held for tensor in (buffer.grad_data, *buffer.extra_main_grads)
        ]
        self._counts = [
            tensor
            for operator in operators.values()
            for tensor in (*operator.buffers.values(), *operator.scaling.values())
        ]

    def put_aside(self) -> Callable[[], None]:
        """Copy everything; returns a function that sets it again."""
        tensors = self._tensors(get_moe_metrics_tracker().metrics)
        kept, rng = [tensor.clone() for tensor in tensors], iteration_state.capture_rng()

        def take_back() -> None:
            get_moe_metrics_tracker().clear()  # also those that are new since
            copy_all(tensors, kept)
            iteration_state.restore_rng(rng)

        return take_back

    def hand_on(
        self,
        line: Line,
        peer: int,
        losses: list[dict[str, torch.Tensor]],
        tokens: torch.Tensor | None,
    ) -> None:
        state = Accumulated(
            rng=iteration_state.capture_rng(),
            metrics=_metrics(),
            losses=losses,
            tokens=None if tokens is None else int(tokens.item()),
        )
        line.send(peer, state)
        send_packed(self._tensors(state.metrics), peer, line.group, line.device)

    def take_over(self, line: Line, peer: int) -> Accumulated:
        state = line.receive(peer, _ACCUMULATED)
        iteration_state.restore_rng(state.rng)
        _expect(state.metrics)
        receive_packed(self._tensors(state.metrics), peer, line.group, line.device)
        return state

    def _tensors(self, metrics: Iterable[str]) -> list[torch.Tensor]:
        entries = get_moe_metrics_tracker().metrics
        return [*self.gradients, *self._counts, *(entries[name].values for name in metrics)]


def _metrics() -> dict[str, Metric]:
    names = {id(group): name for name, group in vars(upstream.groups()).items()}
    return {
        name: Metric(
            entry.values.numel(),
            names.get(id(entry.reduce_group)),
            names.get(id(entry.avg_group)),
            entry.needs_dp_avg,
        )
        for name, entry in get_moe_metrics_tracker().metrics.items()
    }


def _expect(metrics: Mapping[str, Metric]) -> None:
    """Have entries for all metrics, as a rank that has computed, and zero in all others."""
    tracker = get_moe_metrics_tracker()
    groups: Mapping[str | None, object] = dict(vars(upstream.groups()).items())
    tracker.clear()
    for name, metric in metrics.items():
        tracker.ensure_initialized(name, metric.size)
        entry = tracker.metrics[name]
        entry.reduce_group = groups.get(metric.reduce_group)
        entry.avg_group = groups.get(metric.avg_group)
        entry.needs_dp_avg = metric.needs_dp_avg
