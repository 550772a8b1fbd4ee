# SPDX-License-Identifier: Apache-2.0
"""Adapts a training loop on plain torch to recovery; transfers between its pipeline stages."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch._dynamo  # optimizers import it, in seconds; so a spare has it before it is needed
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from moevement_ext import faults
from moevement_ext.config import ConfigurationError
from moevement_ext.faults import Phase
from moevement_ext.job.digest_file import digest_of_bytes
from moevement_ext.job.job import Job
from moevement_ext.job.torch_loop.loop_state import LoopState
from moevement_ext.job.torch_loop.module_operators import ModuleOperators
from moevement_ext.membership.rank import Place
from moevement_ext.memory.budget import NOTHING_LOGGED, Logged
from moevement_ext.memory.ledger import MAX_SCALARS, LedgerEntry
from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.upstream_log.record import Direction, region_bytes
from moevement_ext.plan.replanning import TokenCounter
from moevement_ext.recover.trainer import Committed, Loop, Received
from moevement_ext.regroup.waits import waited


class TorchPipeline:
    """Sends to and receives from the neighbour stages; writes or replays the upstream log.

    A stage receives one tensor from each neighbour for each micro-batch. Training thread only.
    Raises `ConfigurationError` in training otherwise: the size of logs, and their reading in a
    replay, depend on this number.

    `before` and `after` are the neighbours' ranks, None beyond the first and the last stage;
    `boundary_bytes` is the size of the largest tensor that is sent.
    """

    def __init__(
        self, before: int | None, after: int | None, micro_batches: int, boundary_bytes: int
    ) -> None:
        self.neighbours = {Direction.DOWN: before, Direction.UP: after}
        self._log: UpstreamLog | None = None
        self._received: Mapping[Direction, Received] | None = None
        self._iteration = 0
        self._received_of: Counter[Direction] = Counter()
        self._sent_of: Counter[Direction] = Counter()
        self._micro_batches = micro_batches
        self._boundary_bytes = boundary_bytes
        self.logged = NOTHING_LOGGED
        sends = sum(other is not None for other in (before, after))
        if sends:
            record = region_bytes(boundary_bytes)
            self.logged = Logged(micro_batches * sends * record, record)

    def receives(self, entry: LedgerEntry) -> dict[Direction, int]:
        return {
            direction: 0 if other is None else entry.num_microbatches
            for direction, other in self.neighbours.items()
        }

    def log_to(self, log: UpstreamLog | None) -> None:
        self._log = log

    @contextmanager
    def replaying(self, received: Mapping[Direction, Received]) -> Iterator[None]:
        """Within the context, receive from logs and send nothing."""
        self._received = received
        try:
            yield
        finally:
            self._received = None

    def begin(self, iteration: int) -> None:
        """Assign the following tensors to iteration `iteration`, counted from 1."""
        self._iteration = iteration
        self._received_of, self._sent_of = Counter(), Counter()

    def check(self) -> None:
        """Check the number of tensors after an iteration; does nothing in a replay."""
        for direction, other in self.neighbours.items():
            counts = self._received_of[direction], self._sent_of[_opposite(direction)]
            if other is not None and self._received is None and {*counts} != {self._micro_batches}:
                raise ConfigurationError(
                    f'compute received {counts[0]} tensors from rank {other} and sent it '
                    f'{counts[1]}, with micro_batches={self._micro_batches} of the trainer: it '
                    'must receive and send one per micro-batch; pack what belongs together.'
                )

    def send(self, direction: Direction, tensor: torch.Tensor) -> None:
        """Send activations down to the stage after, or gradients up to the stage before."""
        faults.point(Phase.P2P)
        if tensor.nbytes > self._boundary_bytes:
            raise ConfigurationError(
                f'pipeline.send was given {tensor.nbytes} bytes, more than boundary_bytes='
                f'{self._boundary_bytes} of the trainer: set that to the largest tensor sent.'
            )
        self._sent_of[direction] += 1
        if self._log is not None:
            self._log.append(self._iteration, direction, tensor)
        if self._received is None:
            to = self.neighbours[_opposite(direction)]
            assert to is not None
            dist.send(tensor.contiguous(), to)

    def receive(
        self,
        direction: Direction,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = 'cpu',
    ) -> torch.Tensor:
        """Receive activations from the stage before (down), or gradients from that after (up)."""
        faults.point(Phase.P2P)
        sequence = self._received_of[direction]
        self._received_of[direction] += 1
        if self._received is not None:
            return self._received[direction].take(self._iteration, sequence).to(device)
        tensor, source = torch.empty(*shape, dtype=dtype, device=device), self.neighbours[direction]
        assert source is not None
        with waited.waiting_for(source):
            dist.recv(tensor, source)
        return tensor


def _opposite(direction: Direction) -> Direction:
    return Direction.UP if direction is Direction.DOWN else Direction.DOWN


_EXPERT = re.compile(r'(.*\bexperts\.\d+)\.')


class _Update(NamedTuple):
    """Callbacks of the engine around an update."""

    wait: Callable[[], None]
    writing: Callable[[], None]
    written: Callable[[bool], None]


class TorchTrainer:
    """One rank of a loop on plain torch; implements `recover.trainer.Trainer`.

    A subclass implements `compute` and `update`. It also implements `reduce` if an update needs
    values reduced over all ranks, `state_dict` and `load_state_dict` if there is state besides
    random number generators, and `operator_of` if the experts are not in a list named
    `experts`.

    The ranks of a pipeline stage are consecutive, hold the same state and compute on different
    data. All ranks of the job construct the trainer together, in `build` of `Job.set_up`.
    Raises `ConfigurationError` if a rule is broken.

    Args:
        job: of this process.
        model: of this rank's stage, without a wrapper for data parallelism.
        optimizer: of all its parameters.
        last_iteration: iteration at which training ends.
        stages: number of pipeline stages.
        micro_batches: number per iteration; each stage sends one tensor per micro-batch.
        boundary_bytes: size of the largest tensor that a stage sends.

    Attributes:
        pipeline: sends and receives.
        loop: work between iterations; `Job.after_step` adds to it.
        loss: of the newest iteration on this rank.
    """

    state_bytes = 0
    """Upper bound of the result of `state_dict` in bytes, in a subclass whose state may more than
    double, such as that of a data loader. The same on all ranks."""

    copies_from_peers = False
    """True in a subclass in which all ranks of a stage have the same random number state and the
    same `state_dict` after every iteration, whatever their data. Then a lost rank copies the state
    of another rank; otherwise its stage replays."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        optimizer: Optimizer,
        last_iteration: int,
        stages: int = 1,
        micro_batches: int = 1,
        boundary_bytes: int = 0,
    ) -> None:
        rank, ranks = job.rank.number, job.rank.world_size
        if ranks % stages:
            raise ConfigurationError(f'{ranks} ranks are no multiple of {stages} stages.')
        self._job = job
        self._per_stage = ranks // stages
        self.stage = rank // self._per_stage
        self.model = model
        self.optimizer = optimizer
        self.last_iteration = last_iteration
        self.loss: float | None = None
        self.loop: Loop = job.after_steps
        self.tokens = TokenCounter()
        self.resharding = None
        self.operators = ModuleOperators(model, optimizer, self._operator_of)
        self.auxiliary_state = LoopState(self._state, self._load_state, self.state_bytes)
        before = rank - self._per_stage if self.stage else None
        after = rank + self._per_stage if self.stage + 1 < stages else None
        self.pipeline = TorchPipeline(before, after, micro_batches, boundary_bytes)
        self._micro_batches = micro_batches
        self._known: list[float] | None = None
        self._update = _Update(lambda: None, lambda: None, lambda skipped: None)

    # What a loop implements

    def compute(self, iteration: int) -> float | None:
        """Run forward and backward of the iteration after `iteration`; gradients are cleared.

        The ranks of a stage average their gradients here. In a replay the parameters of
        frozen operators have no `grad`, the same parameters on all ranks of the stage.
        Returns the loss of this rank, or None; a replay must return the same number.
        """
        raise NotImplementedError

    def reduce(self) -> list[float]:
        """Reduce the values that the update needs, such as the gradient norm, over all ranks.

        Returns at most 16 numbers. Not called in a replay, which uses the recorded values.
        """
        return []

    def update(self, reduced: list[float]) -> bool | None:
        """Step the optimizer, then all schedules; False: skipped. `reduced` is from `reduce`."""
        raise NotImplementedError

    def state_dict(self) -> Any:
        """Return further state, such as that of a schedule.

        Model, optimizer, random number generators and iteration are not part of it. Allowed
        are numbers, strings, bytes, lists, dicts and small tensors. Must be complete after
        `update`.
        """
        return None

    def load_state_dict(self, state: Any) -> None:
        """Restore the result of `state_dict`; tuples in it have become lists."""

    def operator_of(self, name: str) -> tuple[str, str]:
        """Return name and kind of the operator of the parameter or buffer `name`.

        By default each expert is an operator (kind 'expert'), and so is every other module with
        parameters of its own (kind 'rest').
        """
        if found := _EXPERT.match(name):
            return found[1], 'expert'
        return name.rpartition('.')[0] or 'model', 'rest'

    # What the engine asks

    @cached_property
    def place(self) -> Place:
        """Position of this rank in its stage. The first use is collective."""
        first, ranks = self.stage * self._per_stage, self._job.rank.world_size
        members = list(range(first, first + self._per_stage))
        groups = [
            dist.new_group(list(range(start, start + self._per_stage)))
            for start in range(0, ranks, self._per_stage)
        ]
        group = groups[self.stage]
        assert isinstance(group, dist.ProcessGroup)
        self.operators.group = group
        # A copy from another rank is exact only if the auxiliary state stays equal, and there are
        # no buffers, as each rank may accumulate statistics of its own data in buffers.
        copies = self.copies_from_peers and not self.operators.buffers
        own = digest_of_bytes(self.auxiliary_state.now()).encode() if copies else b''
        states = self._job.rank.exchange('auxiliary state', own)
        alike = bool(own) and all(states[member] == own for member in members)
        others = [member for member in members if member != self._job.rank.number]
        return Place(self.stage, members, group, others if alike else [], interleaved=False)

    @property
    def iteration(self) -> int:
        """Number of committed iterations."""
        return self.auxiliary_state.iteration

    @iteration.setter
    def iteration(self, iteration: int) -> None:
        """Set by a loop that has loaded a checkpoint of its own, in `build`."""
        self.auxiliary_state.iteration = iteration

    def begin_iteration(self, iteration: int) -> bytes:
        """Save the buffers, which the iteration may change; return the auxiliary state.

        Raises `ConfigurationError` if a captured tensor was replaced.
        """
        self.operators.begins()
        return self.auxiliary_state.begins()

    def undo_broken_iteration(self, state: bytes, began: bool) -> None:
        """Restore the auxiliary state, and the buffers if the iteration had begun."""
        self.auxiliary_state.restore(state)
        self.operators.undo(began)

    def around_update(self, *calls: Callable[..., None]) -> None:
        self._update = _Update(*calls)

    def iterate(self, iteration: int) -> float | None:
        faults.point(Phase.FORWARD)
        self.optimizer.zero_grad(set_to_none=True)
        self.pipeline.begin(iteration + 1)
        self.loss = self.compute(iteration)
        self.pipeline.check()
        faults.point(Phase.OPTIMIZER)
        self._update.wait()
        reduced = self._reduce() if self._known is None else self._known
        faults.point(Phase.NORM)
        self._update.writing()
        written = self.update(reduced)
        self.auxiliary_state.reduced, self.auxiliary_state.iteration = reduced, iteration + 1
        self._update.written(written is False)
        faults.point(Phase.AFTER_STEP)
        return self.loss

    def record(self, iteration: int, skipped: bool) -> Committed:
        """Auxiliary state and ledger entry after the update that led to `iteration`."""
        entry = LedgerEntry(
            iteration=iteration,
            grad_norms=self.auxiliary_state.reduced,
            overflows=[],
            num_microbatches=self._micro_batches,
            consumed_samples=0,  # the iteration determines the position in the data
            loss=self.loss,
        )
        return Committed(self.auxiliary_state.committed(), entry)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        self.operators.undo(began=False)
        try:
            yield
        finally:
            self.operators.freeze(())

    @contextmanager
    def reduced(self, known: LedgerEntry | bytes) -> Iterator[None]:
        """Within the context, use the recorded values instead of calling `reduce`."""
        if isinstance(known, LedgerEntry):
            self._known = known.grad_norms
        else:
            self._known = LoopState.reduced_in(known)
        try:
            yield
        finally:
            self._known = None

    def _reduce(self) -> list[float]:
        reduced = self.reduce()
        if len(reduced) > MAX_SCALARS:
            raise ConfigurationError(
                f'reduce() returned {len(reduced)} numbers; at most {MAX_SCALARS} are recorded.'
            )
        return [float(number) for number in reduced]

    def _state(self) -> dict[str, Any]:
        """Settings of the parameter groups, which a schedule changes, and the loop's own state."""
        groups = [
            {name: value for name, value in group.items() if name != 'params'}
            for group in self.optimizer.param_groups
        ]
        return {'groups': groups, 'loop': self.state_dict()}

    def _load_state(self, state: dict[str, Any]) -> None:
        for group, saved in zip(self.optimizer.param_groups, state['groups'], strict=True):
            for name, value in saved.items():
                if torch.is_tensor(group.get(name)):
                    group[name].copy_(value)
                else:
                    group[name] = tuple(value) if isinstance(value, list) else value
        self.load_state_dict(state['loop'])

    def _operator_of(self, name: str) -> tuple[str, str]:
        operator, kind = self.operator_of(name)
        return f'stage{self.stage}.{operator}', kind
