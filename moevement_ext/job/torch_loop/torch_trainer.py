# SPDX-License-Identifier: Apache-2.0
"""A training loop on plain torch as recovery sees it."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch
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
from moevement_ext.job.torch_loop.torch_pipeline import TorchPipeline
from moevement_ext.membership.place import Place
from moevement_ext.memory.batches import copy_all
from moevement_ext.memory.ledger import MAX_SCALARS, LedgerEntry
from moevement_ext.plan.replanning import NoTokens
from moevement_ext.recover.trainer import Committed, Loop, PlainLoop

_EXPERT = re.compile(r'(.*\bexperts\.\d+)\.')


class _Update(NamedTuple):
    """Callbacks of the engine around an update."""

    wait: Callable[[], None]
    writing: Callable[[], None]
    written: Callable[[bool], None]


class TorchTrainer:
    """One rank of a loop on plain torch; implements `recover.trainer.Trainer`.

    A loop implements `compute` and `update`; `reduce` if an update needs what all ranks reduce
    together, `state_dict` and `load_state_dict` if there is more state than random numbers, and
    `operator_of` if its experts are in no list named `experts`.

    The ranks of a pipeline stage follow each other, hold the same state and compute on different
    data. All ranks of the job construct it together, in `build` of `Job.set_up`.

    Args:
        job: of this process.
        model: of this rank's stage, without a wrapper for data parallelism.
        optimizer: of all its parameters.
        last_iteration: at which training ends.
        stages: of the pipeline.
        micro_batches: of an iteration; each stage sends one tensor for each of them.
        boundary_bytes: the largest tensor that a stage sends.

    Attributes:
        model, optimizer, last_iteration: as given.
        pipeline: sends and receives.
        loop: what is around the iterations; one with evaluations or checkpoints replaces it.
        loss: of the newest iteration on this rank.

    Raises:
        ConfigurationError: a rule is broken.
    """

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
        self.loop: Loop = PlainLoop()
        self.tokens = NoTokens()
        self.relaying = None
        self.operators = ModuleOperators(model, optimizer, self._operator_of)
        self.auxiliary_state = LoopState(self._state, self._load_state)
        before = rank - self._per_stage if self.stage else None
        after = rank + self._per_stage if self.stage + 1 < stages else None
        self.pipeline = TorchPipeline(before, after, micro_batches, boundary_bytes)
        self._micro_batches = micro_batches
        self._known: list[float] | None = None
        self._buffers = [buffer.clone() for buffer in self.operators.buffers]
        self._update = _Update(lambda: None, lambda: None, lambda skipped: None)

    # What a loop implements

    def compute(self, iteration: int) -> float | None:
        """Run the iteration after `iteration` forward and backward; gradients are cleared before.

        The ranks of a stage average their gradients here. In a replay the parameters of frozen
        operators have no `grad`, the same ones on all ranks of the stage.

        Returns:
            The loss of this rank, None if it has none. A replay must come to the same number.
        """
        raise NotImplementedError

    def reduce(self) -> list[float]:
        """Reduce over all ranks what the update needs of them, such as the gradient norm.

        Not called in a replay, where what was recorded is taken instead. At most 16 numbers.
        """
        return []

    def update(self, reduced: list[float]) -> bool | None:
        """Step the optimizer, then all schedules.

        Args:
            reduced: what `reduce` returned.

        Returns:
            False if the update is skipped.
        """
        raise NotImplementedError

    def state_dict(self) -> Any:
        """State besides model, optimizer, random numbers and iteration, such as of a schedule.

        Numbers, strings, bytes, lists, dicts and small tensors. It must be complete after `update`.
        """
        return None

    def load_state_dict(self, state: Any) -> None:
        """Restore what `state_dict` returned; a tuple in it is a list now."""

    def operator_of(self, name: str) -> tuple[str, str]:
        """Operator, and its kind, of the parameter or buffer `name`.

        Each expert (kind 'expert') is one, and else each module with parameters of its own.
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
        # A copy from another rank is exact only where all is the same: random numbers, and no
        # buffers, in which each rank may note what it has seen of the data.
        own = b'' if self._buffers else digest_of_bytes(self.auxiliary_state.now()).encode()
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
        """Keep the buffers, which the iteration may change; return the auxiliary state."""
        copy_all(self._buffers, self.operators.buffers)
        return self.auxiliary_state.begins()

    def undo_broken_iteration(self, state: bytes, began: bool) -> None:
        """Restore random numbers, what the loop adds, and buffers."""
        self.auxiliary_state.restore(state)
        if began:
            copy_all(self.operators.buffers, self._buffers)

    def around_update(self, *calls: Callable[..., None]) -> None:
        """Set the callbacks around the update."""
        self._update = _Update(*calls)

    def iterate(self, iteration: int) -> float | None:
        """Run one iteration: compute, reduce, update."""
        faults.point(Phase.FORWARD)
        self.optimizer.zero_grad(set_to_none=True)
        self.pipeline.begin(iteration + 1)
        self.loss = self.compute(iteration)
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
            consumed_samples=0,  # the iteration says where data goes on
            loss=self.loss,
        )
        return Committed(self.auxiliary_state.committed(), entry)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Thaw all operators at the end of the context."""
        try:
            yield
        finally:
            self.operators.freeze(())

    @contextmanager
    def reduced(self, known: LedgerEntry | bytes) -> Iterator[None]:
        """Use what was recorded within the context, instead of `reduce`."""
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
        """Settings of the parameter groups, which a schedule changes, and what the loop adds."""
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
