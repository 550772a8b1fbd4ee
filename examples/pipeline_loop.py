# SPDX-License-Identifier: Apache-2.0
r"""A training loop on plain torch that survives failures: no Megatron, a hand-written pipeline.

    scripts/local_cluster.py --nodes 3 --spares 1 --kill 1@12 -- \
        examples/pipeline_loop.py --text README.md --iterations 40

Each rank is a stage of a small language model with a Mixture of Experts; micro-batches pass forward
through the stages, then all pass backward. `PipelineTrainer` implements the interface that recovery
needs (`moevement_ext.recover.trainer`), as `megatron.moevement` does for Megatron.
"""

import argparse
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from moevement_ext import faults
from moevement_ext.capture.layout import OperatorSlices, TensorSlice
from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.events import EventLog
from moevement_ext.job.ending import finish
from moevement_ext.job.job import Job
from moevement_ext.job.joining import join
from moevement_ext.membership.exchange import Exchange
from moevement_ext.membership.place import Place
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.mapped import Bytes
from moevement_ext.memory.sizing import Logged
from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.upstream_log.record import Direction
from moevement_ext.memory.upstream_log.ring import region_bytes
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.memory.window.slot import SlotContext, SlotHeader
from moevement_ext.plan.replanning import NoTokens
from moevement_ext.process.leaving import leave
from moevement_ext.recover.trainer import Committed, PlainLoop, Received
from moevement_ext.regroup.process_groups import stand_in_for

_HIDDEN, _EXPERTS, _VOCABULARY = 32, 4, 256
_SEQUENCE, _SAMPLES, _MICRO_BATCHES = 24, 2, 4
_CLIP = 0.5
_TIMEOUT = timedelta(minutes=5)


class Experts(nn.Module):
    """Feed-forward experts; each token is routed to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(_HIDDEN, _EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(_HIDDEN, 48), nn.GELU(), nn.Linear(48, _HIDDEN))
            for _ in range(_EXPERTS)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states [samples, tokens, hidden] to the same shape."""
        probability, choice = self.router(hidden).softmax(dim=-1).max(dim=-1)
        result = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            mine = choice == index
            result[mine] = expert(hidden[mine]) * probability[mine].unsqueeze(-1)
        return hidden + result


class Stage(nn.Module):
    """Layers of one pipeline stage; the first has the embedding, the last the head."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _HIDDEN) if stage == 0 else None
        self.mixing = nn.Linear(_HIDDEN, _HIDDEN)
        self.dropout = nn.Dropout(0.1)
        self.moe = Experts()
        self.head = nn.Linear(_HIDDEN, _VOCABULARY, bias=False) if stage == stages - 1 else None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Map tokens, or hidden states of the stage before, to hidden states or logits."""
        hidden = given if self.embedding is None else self.embedding(given)
        before = hidden.cumsum(dim=1) / torch.arange(1, hidden.shape[1] + 1).unsqueeze(-1)
        hidden = self.moe(hidden + self.dropout(self.mixing(before).tanh()))
        return hidden if self.head is None else nn.functional.linear(hidden, self.head.weight)


def adam(model: nn.Module) -> torch.optim.Adam:
    """Create Adam with all its state, so that captures have sources."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            'step': torch.zeros(1),
            'exp_avg': torch.zeros_like(parameter),
            'exp_avg_sq': torch.zeros_like(parameter),
        }
    return optimizer


class StageOperators:
    """The state of one stage; its operators are each expert, the router, and the rest."""

    tied: tuple[str, ...] = ()
    device = torch.device('cpu')

    def __init__(self, stage: int, model: Stage, optimizer: torch.optim.Adam) -> None:
        self._members: dict[str, list[nn.Parameter]] = {}
        self.kinds: dict[str, str] = {}
        full: dict[str, list[TensorSlice]] = {}
        light: dict[str, list[TensorSlice]] = {}
        for name, parameter in model.named_parameters():
            operator, kind = _operator_of(stage, name)
            self.kinds[operator] = kind
            self._members.setdefault(operator, []).append(parameter)
            weight = _slice(operator, name, 'weight', parameter)
            light.setdefault(operator, []).append(weight)
            full.setdefault(operator, []).append(weight)
            for part, tensor in optimizer.state[parameter].items():
                full[operator].append(_slice(operator, name, part, tensor))
        self.slices = {
            operator: OperatorSlices(tuple(full[operator]), tuple(light[operator]))
            for operator in full
        }

    def check(self, header: SlotHeader) -> None:
        """Accept any slot: the run's identity covers the whole configuration of this program."""

    def load(self, header: SlotHeader, payload: Bytes, context: SlotContext) -> None:
        """Copy captured tensors back to their sources."""
        targets = {(s.tensor, s.part): s.source for o in self.slices.values() for s in o.full}
        for record in header.records:
            content = payload[record.offset : record.offset + record.nbytes]
            target = targets[record.tensor, record.part]
            target.copy_(torch.from_numpy(content).view(target.dtype))

    def freeze(self, names: Collection[str]) -> None:
        """Freeze parameters by `requires_grad`: they get no gradient, and no update."""
        for operator, parameters in self._members.items():
            for parameter in parameters:
                parameter.requires_grad_(operator not in names)

    def copy(self, source: int) -> None:
        """Raise NotImplementedError: no other rank has the state of this stage."""
        raise NotImplementedError('one rank per stage')


def _slice(operator: str, name: str, part: str, tensor: torch.Tensor) -> TensorSlice:
    return TensorSlice(operator, name, part, 0, tensor.numel(), tensor.detach().view(-1))


def _operator_of(stage: int, name: str) -> tuple[str, str]:
    """Name and kind of a parameter's operator."""
    if name.startswith('moe.experts.'):
        return f'layer{stage}.expert{name.split(".")[2]}', 'expert'
    if name.startswith('moe.router.'):
        return f'layer{stage}.router', 'router'
    return f'layer{stage}.rest', 'rest'


class Boundary:
    """Sends to and receives from the neighbour stages; keeps a log, or replays one."""

    def __init__(self, stage: int, stages: int) -> None:
        self._stage, self._stages = stage, stages
        self._log: UpstreamLog | None = None
        self._received: Mapping[Direction, Received] | None = None
        self._iteration = 0
        self._sequence: dict[Direction, int] = {}
        self._shape = (_SAMPLES, _SEQUENCE, _HIDDEN)
        record = region_bytes(4 * _SAMPLES * _SEQUENCE * _HIDDEN)
        self.logged = Logged(_MICRO_BATCHES * ((stage > 0) + (stage + 1 < stages)) * record, record)

    @property
    def neighbours(self) -> dict[Direction, int | None]:
        """Ranks that activations come from (down), and gradients (up)."""
        before = self._stage - 1 if self._stage else None
        after = self._stage + 1 if self._stage + 1 < self._stages else None
        return {Direction.DOWN: before, Direction.UP: after}

    def receives(self, entry: LedgerEntry) -> dict[Direction, int]:
        """One tensor for each micro-batch, from each neighbour."""
        return {
            direction: 0 if other is None else entry.num_microbatches
            for direction, other in self.neighbours.items()
        }

    def log_to(self, log: UpstreamLog | None) -> None:
        """Log all sent tensors."""
        self._log = log

    @contextmanager
    def replaying(self, received: Mapping[Direction, Received]) -> Iterator[None]:
        """Receive from logs and send nothing within the context."""
        self._received = received
        try:
            yield
        finally:
            self._received = None

    def begin(self, iteration: int) -> None:
        """Assign the following tensors to iteration `iteration`, counted from 1."""
        self._iteration, self._sequence = iteration, dict.fromkeys(Direction, 0)

    def send(self, direction: Direction, tensor: torch.Tensor) -> None:
        """Send activations down to the next stage, or gradients up to the previous one."""
        if self._log is not None:
            self._log.append(self._iteration, direction, tensor)
        if self._received is None:
            other = self._stage + (1 if direction is Direction.DOWN else -1)
            dist.send(tensor.contiguous(), other)

    def receive(self, direction: Direction) -> torch.Tensor:
        """Receive the next tensor of a direction, [samples, tokens, hidden]."""
        if self._received is not None:
            sequence = self._sequence[direction]
            self._sequence[direction] += 1
            return self._received[direction].take(self._iteration, sequence)
        tensor, other = torch.empty(self._shape), self.neighbours[direction]
        assert other is not None
        dist.recv(tensor, other)
        return tensor


@dataclass
class StageState:
    """State at the start of an iteration, except tensors; random numbers are torch's own."""

    iteration: int = 0
    norm: float = 0.0
    """Gradient norm of the step before, over all stages."""

    @property
    def max_bytes(self) -> int:
        """Size of the state; the state of a generator has a fixed size."""
        return len(self.now()) + 64

    def now(self) -> bytes:
        """Random numbers, and the norm that a replay of the step before needs."""
        rng = torch.get_rng_state().numpy().tobytes()
        return msgspec.msgpack.encode((self.iteration, self.norm, rng))

    def restore(self, state: bytes) -> None:
        """Restore the state; inverse of `now`."""
        self.iteration, self.norm, rng = decode(state)
        torch.set_rng_state(torch.frombuffer(bytearray(rng), dtype=torch.uint8))

    def move_data(self, state: bytes) -> None:
        """Do nothing: batches are a function of the iteration."""

    def set_counters(self, state: bytes, validation: bytes | None = None) -> None:
        """Set the iteration."""
        self.iteration, _, _ = decode(state)

    def count(self, iteration: int, samples: int | None) -> None:
        """Set the iteration."""
        self.iteration = iteration


def decode(state: bytes) -> tuple[int, float, bytes]:
    """Split a small state into iteration, norm and random numbers."""
    return msgspec.msgpack.decode(state, type=tuple[int, float, bytes])


class Update(NamedTuple):
    """Callbacks of the engine around an update."""

    before: Callable[[], None]
    writing: Callable[[], None]
    written: Callable[[bool], None]


@dataclass
class PipelineTrainer:
    """One stage; implements `recover.trainer.Trainer`."""

    stage: int
    stages: int
    text: torch.Tensor
    last_iteration: int
    loss: float | None = None
    _replayed_norm: float | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(1234 + self.stage)
        self.model = Stage(self.stage, self.stages)
        self.optimizer = adam(self.model)
        self.operators = StageOperators(self.stage, self.model, self.optimizer)
        self.small_state = StageState()
        self.pipeline = Boundary(self.stage, self.stages)
        self.loop, self.tokens, self.relaying = PlainLoop(), NoTokens(), None
        alone = [dist.new_group([stage]) for stage in range(self.stages)][self.stage]
        assert isinstance(alone, dist.ProcessGroup)
        self.place = Place(self.stage, [self.stage], alone, [], interleaved=False)

    @property
    def iteration(self) -> int:
        """Number of committed iterations."""
        return self.small_state.iteration

    def begin_iteration(self, iteration: int) -> bytes:
        """State at the start of the iteration after `iteration`; expert load is not part of it."""
        return self.small_state.now()

    def undo_broken_iteration(self, state: bytes, began: bool) -> None:
        """Restore the random numbers, the only change outside of the update."""
        self.small_state.restore(state)

    def iterate(self, iteration: int) -> float | None:
        """Run all micro-batches forward, all backward, and update; return the loss (last stage)."""
        self.pipeline.begin(iteration + 1)
        for parameter in self.model.parameters():
            parameter.grad = None
        passes = [self._forward(iteration, index) for index in range(_MICRO_BATCHES)]
        for given, result in passes:
            self._backward(given, result)
        if self.stage == self.stages - 1:
            self.loss = sum(float(loss.detach()) for _, loss in passes) / _MICRO_BATCHES
        self.update.before()
        self.small_state.norm = norm = self._global_norm()
        self.update.writing()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= min(1.0, _CLIP / norm)
        self.optimizer.step()
        self.small_state.iteration = iteration + 1
        self.update.written(False)
        return self.loss

    def record(self, iteration: int, skipped: bool) -> Committed:
        """State and ledger entry with the norm, which a stage cannot compute alone in a replay."""
        entry = LedgerEntry(
            iteration=iteration,
            grad_norms=[self.small_state.norm],
            overflows=[],
            num_microbatches=_MICRO_BATCHES,
            consumed_samples=iteration * _MICRO_BATCHES * _SAMPLES,
            loss=self.loss,
        )
        return Committed(self.small_state.now(), entry)

    def around_update(self, *calls: Callable[..., None]) -> None:
        """Set the callbacks around the update of `iterate`."""
        self.update = Update(*calls)

    def _batch(self, iteration: int, index: int) -> torch.Tensor:
        """Tokens [samples, sequence + 1]; always equal for equal arguments."""
        first = (iteration * _MICRO_BATCHES + index) * _SAMPLES * _SEQUENCE
        starts = [
            (first + n * _SEQUENCE) % (len(self.text) - _SEQUENCE - 1) for n in range(_SAMPLES)
        ]
        return torch.stack([self.text[start : start + _SEQUENCE + 1] for start in starts]).long()

    def _forward(self, iteration: int, index: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        tokens = self._batch(iteration, index)
        given = self.pipeline.receive(Direction.DOWN).requires_grad_() if self.stage else None
        result = self.model(tokens[:, :-1] if given is None else given)
        if self.stage == self.stages - 1:
            target = tokens[:, 1:].reshape(-1)
            return given, nn.functional.cross_entropy(result.reshape(-1, _VOCABULARY), target)
        self.pipeline.send(Direction.DOWN, result.detach())
        return given, result

    def _backward(self, given: torch.Tensor | None, result: torch.Tensor) -> None:
        if self.stage == self.stages - 1:
            (result / _MICRO_BATCHES).backward()
        else:
            gradient = self.pipeline.receive(Direction.UP)
            if result.requires_grad:  # else the whole stage is frozen
                result.backward(gradient)
        if given is not None:
            assert given.grad is not None
            self.pipeline.send(Direction.UP, given.grad)

    def _global_norm(self) -> float:
        if self._replayed_norm is not None:
            return self._replayed_norm
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        square = torch.stack([g.double().square().sum() for g in gradients]).sum()
        dist.all_reduce(square)
        return float(square.sqrt())

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Thaw all operators at the end of the context."""
        try:
            yield
        finally:
            self.operators.freeze(())

    @contextmanager
    def reduced(self, known: LedgerEntry | bytes) -> Iterator[None]:
        """Use the known norm instead of a reduction over all stages."""
        if isinstance(known, LedgerEntry):
            self._replayed_norm = known.grad_norms[0]
        else:
            _, self._replayed_norm, _ = decode(known)
        try:
            yield
        finally:
            self._replayed_norm = None


def main() -> None:
    """Train; the lines with `job` add protection."""
    options = parse_arguments()
    stage, stages = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
    config = SparseCheckpointConfig(
        window=options.window,
        replicas=1,
        dir=options.dir,
        run_id=options.run_id,
        events=options.events,
    )
    settings = f'{options.text}:{options.iterations}'  # and all else that may decide bits
    identity = RankIdentity(settings, f'pp{stages}', stage)
    membership, store = join(identity, stages, options.run_id, config, _TIMEOUT)
    joining = membership is not None and membership.joining
    exchange = Exchange(membership.archive if membership else None, joining)
    events = EventLog(config.events, stage)
    rank = Rank(identity, stages, options.run_id, 'gloo', config, events, exchange)
    faults.arm(stage)  # for tests and drills
    job = Job(rank, membership)
    connect(job, store)
    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8)

    def build(with_dense: bool) -> PipelineTrainer:
        return PipelineTrainer(stage, stages, text, options.iterations)

    job.set_up(build, lambda: None, last_iteration=options.iterations)
    trainer: PipelineTrainer = job.trainer  # type: ignore[assignment]

    def loop() -> None:
        while trainer.iteration < options.iterations:
            loss = job.step(trainer.iteration)
            if loss is not None:
                print(
                    f' iteration {trainer.iteration:8d}/{options.iterations:8d} | '
                    f'lm loss: {loss:.6E} |',
                    flush=True,
                )

    job.train(loop, trainer.around_update)
    if options.digest is not None:
        write_digest(options.digest, trainer)
    finish(job)
    leave(0)


def connect(job: Job, store: dist.Store | None) -> None:
    """Call `init_process_group`; a process that joins a running job is connected later."""
    rank, ranks = job.rank.number, job.rank.world_size
    if job.joining:
        stand_in_for('gloo')
        dist.init_process_group('fake', store=FakeStore(), rank=rank, world_size=ranks)
        return
    dist.init_process_group('gloo', store=store, timeout=_TIMEOUT, rank=rank, world_size=ranks)


def write_digest(path: Path, trainer: PipelineTrainer) -> None:
    """SHA-256 of every tensor of the state, see `tools/compare_digests.py`. Collective."""
    entries = {
        f'{part.tensor}/{part.part}': hashlib.sha256(part.source.numpy().tobytes()).hexdigest()
        for item in trainer.operators.slices.values()
        for part in item.full
    }
    everyone: list[dict[str, str]] = [{}] * trainer.stages
    dist.all_gather_object(everyone, entries)
    if trainer.stage == 0:
        ranks = {str(rank): found for rank, found in enumerate(everyone)}
        path.write_text(json.dumps({'iteration': trainer.iteration, 'ranks': ranks}))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog='pipeline_loop', description=__doc__)
    parser.add_argument('--text', type=Path, required=True, help='file to train on')
    parser.add_argument('--iterations', type=int, default=40)
    parser.add_argument('--dir', default=SparseCheckpointConfig.dir, help='host memory, in a tmpfs')
    parser.add_argument('--run-id', default='pipeline', help='give the same to resume a run')
    parser.add_argument('--window', type=int, default=3, help='iterations per window')
    parser.add_argument('--events', metavar='DIR', help='write events as JSON lines')
    parser.add_argument('--digest', type=Path, metavar='FILE', help='write digests of the state')
    return parser.parse_args()


if __name__ == '__main__':
    main()
