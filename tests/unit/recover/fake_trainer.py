# SPDX-License-Identifier: Apache-2.0
"""A trainer of a few lines, one stage of a pipeline, whose arithmetic couples everything.

Every bit that an iteration computes depends on the compute weights of all operators, on the random
state, on what the neighbours sent, and on what all ranks reduced together.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import msgspec
import torch

from moevement_ext import faults
from moevement_ext.capture.layout import OperatorSlices, TensorSlice
from moevement_ext.faults import Phase
from moevement_ext.membership.rank import Place
from moevement_ext.memory.budget import Logged
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.mapped_file import Bytes
from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.upstream_log.record import Direction, region_bytes
from moevement_ext.memory.window.slot import SlotContext, SlotHeader
from moevement_ext.plan.replanning import TokenCounter
from moevement_ext.recover.trainer import Committed, PlainLoop, Received

MICRO_BATCHES = 2


def mixed(*parts: object) -> bytes:
    """Eight bytes that depend on every bit of `parts`."""
    return hashlib.sha256(repr(parts).encode()).digest()[:8]


class Wire(Protocol):
    def send(self, to: int, content: bytes) -> None: ...

    def receive(self, source: int) -> bytes: ...

    def gather(self, own: bytes) -> list[bytes]: ...


class Alone:
    def send(self, to: int, content: bytes) -> None:
        raise AssertionError(f'there is no rank {to}')

    def receive(self, source: int) -> bytes:
        raise AssertionError(f'there is no rank {source}')

    def gather(self, own: bytes) -> list[bytes]:
        return [own]


class FakeOperators:
    """Each has a master and a compute weight, which is a function of the master."""

    tied: tuple[str, ...] = ()
    device = torch.device('cpu')

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.master = {name: torch.zeros(8, dtype=torch.uint8) for name in names}
        self.weight = {name: torch.zeros(2, dtype=torch.uint8) for name in names}
        self.kinds = dict.fromkeys(names, 'rest')
        self.slices = {
            name: OperatorSlices(
                full=(_slice(name, 'master', self.master[name]),),
                weights=(_slice(name, 'weight', self.weight[name]),),
            )
            for name in names
        }
        self.frozen: frozenset[str] = frozenset()
        self.log: list[tuple[str, object]] = []
        for name in names:
            self.write(name, mixed('fresh', name))

    def write(self, name: str, master: bytes) -> None:
        """A new value, and the weight that follows from it."""
        _put(self.master[name], master)
        _put(self.weight[name], mixed('cast', master)[:2])

    def weights(self) -> list[tuple[str, bytes]]:
        return [(name, _bytes(self.weight[name])) for name in self.names]

    def renew(self) -> None: ...

    def check(self, header: SlotHeader) -> None: ...

    def load(self, header: SlotHeader, payload: Bytes, context: SlotContext) -> None:
        """Masters of some operators, compute weights of others."""
        for record in header.records:
            content = payload[record.offset : record.offset + record.nbytes].tobytes()
            if record.part == 'master':
                self.write(record.operator, content)
            else:
                _put(self.weight[record.operator], content)
        self.log.append(('load', header.slot))

    def freeze(self, names: Collection[str]) -> None:
        self.frozen = frozenset(names)
        self.log.append(('freeze', self.frozen))

    def copy(self, source: int) -> None:
        raise NotImplementedError


class FakeState:
    """Iteration, random state, and what the step before reduced."""

    max_bytes = 64

    def __init__(self) -> None:
        self.iteration = 0
        self.random = b'seed'
        self.norm = 0.0
        self.validation = 0

    def now(self) -> bytes:
        return msgspec.msgpack.encode((self.iteration, self.random, self.norm))

    def restore(self, state: bytes) -> None:
        self.iteration, self.random, self.norm = decoded(state)

    def move_data(self, state: bytes) -> None: ...

    def set_counters(self, state: bytes, validation: bytes | None = None) -> None:
        self.iteration, _, _ = decoded(state)

    def count(self, iteration: int, samples: int | None, validation: int | None = None) -> None:
        self.iteration = iteration
        self.validation = self.validation if validation is None else validation


def decoded(state: bytes) -> tuple[int, bytes, float]:
    return msgspec.msgpack.decode(state, type=tuple[int, bytes, float])


class FakePipeline:
    """Micro-batches go down through the stages, and gradients up."""

    def __init__(self, stage: int, stages: int, wire: Wire) -> None:
        self._wire = wire
        self._log: UpstreamLog | None = None
        self._received: Mapping[Direction, Received] | None = None
        self._iteration = 0
        self._sequence: dict[Direction, int] = {}
        self.neighbours = {
            Direction.DOWN: stage - 1 if stage else None,
            Direction.UP: stage + 1 if stage + 1 < stages else None,
        }
        sends = sum(other is not None for other in self.neighbours.values())
        record = region_bytes(8)
        self.logged = Logged(MICRO_BATCHES * sends * record, record if sends else 0)

    def receives(self, entry: LedgerEntry) -> dict[Direction, int]:
        others = self.neighbours.items()
        return {direction: entry.num_microbatches * (it is not None) for direction, it in others}

    def log_to(self, log: UpstreamLog | None) -> None:
        self._log = log

    @contextmanager
    def replaying(self, received: Mapping[Direction, Received]) -> Iterator[None]:
        self._received = received
        try:
            yield
        finally:
            self._received = None

    def begin(self, iteration: int) -> None:
        """What follows belongs to iteration `iteration`, counted from 1."""
        self._iteration, self._sequence = iteration, dict.fromkeys(Direction, 0)

    def receive(self, direction: Direction, first: bytes) -> bytes:
        """The next of that direction; `first` where it begins."""
        source = self.neighbours[direction]
        if source is None:
            return first
        if self._received is None:
            return self._wire.receive(source)
        sequence = self._sequence[direction]
        self._sequence[direction] += 1
        return _bytes(self._received[direction].take(self._iteration, sequence))

    def send(self, direction: Direction, content: bytes) -> None:
        """To the stage after, or before; the last of each direction sends nothing."""
        back = Direction.UP if direction is Direction.DOWN else Direction.DOWN
        to = self.neighbours[back]
        if to is None:
            return
        if self._log is not None:
            tensor = torch.zeros(8, dtype=torch.uint8)
            _put(tensor, content)
            self._log.append(self._iteration, direction, tensor)
        if self._received is None:
            self._wire.send(to, content)
        faults.point(Phase.P2P)


class FakeLoop(PlainLoop):
    """One evaluation follows each iteration, which counts how many there were."""

    def __init__(self) -> None:
        self.before = self.evaluations = 0
        self.done = True

    def committed(self, iteration: int) -> None:
        self.before, self.done = self.evaluations, False

    def evaluate(self) -> None:
        faults.point(Phase.EVALUATE)
        self.evaluations, self.done = self.before + 1, True
        faults.point(Phase.EVALUATED)

    def hand_over(self) -> bytes:
        return msgspec.msgpack.encode((self.before, self.evaluations, self.done))

    def finish_post_step(
        self, target: int, others: Sequence[bytes], entry: LedgerEntry | None
    ) -> bool:
        told = [msgspec.msgpack.decode(item, type=tuple[int, int, bool]) for item in others]
        self.done = all(done for _, _, done in told)
        self.before = max(before for before, _, _ in told)
        self.evaluations = max(now for _, now, _ in told)
        if not self.done:
            self.evaluate()
        return True


class Update(NamedTuple):
    """What the engine wants to be called around an update."""

    before: Callable[[], None]
    writing: Callable[[], None]
    written: Callable[[bool], None]


class FakeTrainer:
    """One stage; one that is frozen in part computes all but the updates of what is frozen."""

    def __init__(
        self, names: Sequence[str], stage: int = 0, stages: int = 1, wire: Wire | None = None
    ) -> None:
        self.stage = stage
        self.operators = FakeOperators(names)
        self.auxiliary_state = FakeState()
        self.wire = wire or Alone()
        self.pipeline = FakePipeline(stage, stages, self.wire)
        self.loop = FakeLoop()
        self.tokens = TokenCounter()
        self.place = Place(stage, [stage], None, [], interleaved=False)
        self.last_iteration = 0
        self.update = Update(lambda: None, lambda: None, lambda skipped: None)
        self.loss: float | None = None
        self._known: float | None = None

    @property
    def iteration(self) -> int:
        return self.auxiliary_state.iteration

    def everything(self) -> tuple[object, ...]:
        masters = {name: _bytes(tensor) for name, tensor in self.operators.master.items()}
        return masters, self.operators.weights(), self.auxiliary_state.random

    def begin_iteration(self, iteration: int) -> bytes:
        return self.auxiliary_state.now()

    def undo_broken_iteration(self, state: bytes, began: bool) -> None:
        self.auxiliary_state.restore(state)

    def iterate(self, iteration: int) -> None:
        """All micro-batches down, all gradients up, one update of all that is not frozen."""
        faults.point(Phase.FORWARD)
        self.pipeline.begin(iteration + 1)
        weights = self.operators.weights()
        passes = [self._forward(iteration, index, weights) for index in range(MICRO_BATCHES)]
        self.loss = float(int.from_bytes(mixed('loss', passes)[:6]))
        backward = [self._backward(given, result, weights) for given, result in passes]
        faults.point(Phase.OPTIMIZER)
        self.update.before()
        active = [name for name in self.operators.names if name not in self.operators.frozen]
        gradients = {name: mixed('gradient', name, weights, passes, backward) for name in active}
        self.auxiliary_state.norm = self._norm(gradients)
        faults.point(Phase.NORM)
        self.update.writing()
        self._write(gradients)
        self.auxiliary_state.iteration = iteration + 1
        self.update.written(False)
        faults.point(Phase.AFTER_STEP)

    def record(self, iteration: int, skipped: bool) -> Committed:
        norms = [self.auxiliary_state.norm]
        entry = LedgerEntry(iteration, norms, [], MICRO_BATCHES, iteration, loss=self.loss)
        return Committed(self.auxiliary_state.now(), entry)

    def around_update(self, *calls: Callable[..., None]) -> None:
        self.update = Update(*calls)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.operators.freeze(())

    @contextmanager
    def reduced(self, known: LedgerEntry | bytes) -> Iterator[None]:
        if isinstance(known, LedgerEntry):
            self._known = known.grad_norms[0]
        else:
            _, _, self._known = decoded(known)
        try:
            yield
        finally:
            self._known = None

    def _forward(self, iteration: int, index: int, weights: object) -> tuple[bytes, bytes]:
        given = self.pipeline.receive(Direction.DOWN, mixed('data', iteration, index))
        state = self.auxiliary_state
        state.random = mixed('random', state.random)
        result = mixed(given, weights, state.random)
        self.pipeline.send(Direction.DOWN, result)
        return given, result

    def _backward(self, given: bytes, result: bytes, weights: object) -> bytes:
        gradient = self.pipeline.receive(Direction.UP, mixed('loss', result))
        self.pipeline.send(Direction.UP, mixed('input', gradient, given, weights))
        return gradient

    def _norm(self, gradients: Mapping[str, bytes]) -> float:
        """An integer, so that all ranks have the same bits; frozen operators are missed in it."""
        if self._known is not None:
            return self._known
        everyone = self.wire.gather(mixed('norm', sorted(gradients.items())))
        return float(int.from_bytes(mixed(everyone)[:6]))

    def _write(self, gradients: Mapping[str, bytes]) -> None:
        for name, gradient in gradients.items():
            master = _bytes(self.operators.master[name])
            self.operators.write(name, mixed(master, gradient, self.auxiliary_state.norm))
            faults.point(Phase.STEP)  # the others are still to be written


def _slice(operator: str, part: str, tensor: torch.Tensor) -> TensorSlice:
    return TensorSlice(operator, operator, part, 0, tensor.numel(), tensor)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _put(tensor: torch.Tensor, content: bytes) -> None:
    tensor.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
