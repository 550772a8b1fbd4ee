# SPDX-License-Identifier: Apache-2.0
"""Replaces the recording of passes, which needs a GPU."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import full_cuda_graph
from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
from megatron.training import get_args, training

from megatron.moevement.seams import patches


class Iterations:
    """What this process has run, those that it replayed included."""

    run = 0

    @classmethod
    def count(cls) -> None:
        def train_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            cls.run += 1
            return original(*args, **kwargs)

        patches.wrap('megatron.training.training:train_step', train_step)


def _say_that_passes_are_recorded(model: Sequence[torch.nn.Module]) -> None:
    """When upstream records, and how many weights are frozen then."""
    weights = [weight for chunk in model for weight in chunk.parameters()]
    frozen = sum(not weight.requires_grad for weight in weights)
    print(f'recorded after iterations: {Iterations.run} | frozen: {frozen}')


def _record_in_the_loop(implementation: str) -> None:
    """Upstream's loop is to record; model and random numbers were made without, on the CPU."""

    def train(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        get_args().cuda_graph_impl = implementation
        get_args().cuda_graph_warmup_steps = 1
        return original(*args, **kwargs)

    patches.wrap('megatron.training.training:train', train)
    Iterations.count()


class Recorder:
    def __init__(self, model: Sequence[torch.nn.Module], **settings: Any) -> None:
        self._model = model
        self._finished = False

    def capture_finished(self) -> bool:
        """Upstream records once."""
        return self._finished

    def graphs_created(self) -> bool:
        """There is nothing to delete."""
        return False

    def create_cudagraphs(self) -> None:
        """Upstream records now."""
        _say_that_passes_are_recorded(self._model)
        self._finished = True

    def cuda_graph_set_manual_hooks(self) -> None:
        """There are no graphs to set hooks of."""


def layers_are_recorded() -> None:
    """Graphs of single layers, by upstream's loop."""
    training.TECudaGraphHelper = Recorder
    _record_in_the_loop('transformer_engine')


class Graph:
    """In the place of a graph of CUDA: what was recorded is computed, from where it was read then.

    On a GPU only kernels run again; here the Python around them does, too.
    """

    recording: 'Graph | None' = None

    def __init__(self) -> None:
        self._compute: Callable[..., list[Any]] = list
        self._schedule: Mapping[str, Any] = {}
        self._result: list[Any] = []

    def register_generator_state(self, state: Any) -> None:
        """There is one state on a CPU, which goes on by itself."""

    def record(self, compute: Callable[..., list[Any]], schedule: Mapping[str, Any]) -> list[Any]:
        """Nothing is computed while it is recorded."""
        self._compute, self._schedule = compute, schedule
        return self._result

    def replay(self) -> None:
        """Compute what was recorded; the result has its place."""
        read = StaticBufferLoader.static_buffers['training']
        data = [iter(read) if one else None for one in self._schedule['data_iterator']]
        self._result[:] = self._compute(**{**self._schedule, 'data_iterator': data})


@contextmanager
def _recording(graph: Graph, **how: Any) -> Iterator[None]:
    Graph.recording = graph
    try:
        yield
    finally:
        Graph.recording = None


class OnCpu(FullCudaGraphWrapper):
    """Upstream's, whose schedule can be recorded."""

    def __init__(self, schedule: Callable[..., list[Any]], **settings: Any) -> None:
        def recordable(**what: Any) -> list[Any]:
            if Graph.recording is None:
                return schedule(**what)
            _say_that_passes_are_recorded(what['model'])
            return Graph.recording.record(schedule, what)

        super().__init__(recordable, **settings)


def whole_iterations_are_recorded() -> None:
    """Forward and backward passes of all micro-batches, as one graph."""
    training.FullCudaGraphWrapper = OnCpu
    full_cuda_graph.get_all_rng_states = dict
    full_cuda_graph.get_graph_pool = full_cuda_graph.get_shared_capture_stream = lambda *_: None
    torch.cuda.CUDAGraph, torch.cuda.graph = Graph, _recording  # type: ignore[misc, assignment]
    _record_in_the_loop('full_iteration')
