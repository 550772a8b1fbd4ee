# SPDX-License-Identifier: Apache-2.0
"""Pipeline communication that logs all sent tensors, and can replay received ones.

Upstream's schedules take any `P2PCommunicator`; all of its methods end in `_communicate`, the one
private method that is overridden here. In training it logs the tensors to send and lets upstream
send them. In a replay it sends nothing; received tensors come from the logs of the neighbour
stages, in the order in which those stages sent them: the k-th tensor of an iteration and direction
always belongs to the same micro-batch and model chunk (paper section 3.4, upstream logging).
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config
from torch.distributed import ProcessGroup

from megatron.moevement.facts import Chunks, JobFacts, TransformerConfig
from megatron.moevement.seams import upstream
from moevement_ext import faults
from moevement_ext.faults import Phase
from moevement_ext.memory.budget import NOTHING_LOGGED, Logged
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.upstream_log.record import Direction, region_bytes
from moevement_ext.recover.trainer import Received
from moevement_ext.regroup.waits import waited


class _Done:
    """A request of the overlapped schedule that is complete from the start."""

    def wait(self) -> None:
        """Return at once."""


class _Arriving:
    """A request whose tensor is still being copied to the device, maybe on another stream."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._copied = torch.cuda.Event()
        self._copied.record()

    def wait(self) -> None:
        """Make later work of the current stream wait for the copy."""
        self._copied.wait()
        self._tensor.record_stream(torch.cuda.current_stream())


class _OwnWaits:
    """Upstream's configuration, with which an exchange does not wait for the whole device."""

    batch_p2p_sync = False

    def __init__(self, config: TransformerConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class BoundaryCommunicator(P2PCommunicator):
    """Upstream's communicator with a log. Training thread only.

    Args:
        log: keeps the sent tensors; None: nothing is logged.
    """

    def __init__(
        self, pp_group: ProcessGroup, config: TransformerConfig, log: UpstreamLog | None
    ) -> None:
        super().__init__(pp_group, config)
        self.config = _OwnWaits(config)
        self._waits = config.batch_p2p_comm and config.batch_p2p_sync
        self._log = log
        self._iteration = 0
        self._received: Mapping[Direction, Received] | None = None
        self._sequence: dict[Direction, int] = {}

    def at_iteration(self, iteration: int) -> None:
        """Assign the following tensors to iteration `iteration` (counted from 1)."""
        self._iteration = iteration
        self._sequence = dict.fromkeys(Direction, 0)

    @contextmanager
    def replaying(self, received: Mapping[Direction, Received]) -> Iterator[None]:
        """Within the context, receive from logs and send only into this rank's log."""
        self._received = received
        try:
            yield
        finally:
            self._received = None

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: object,
        wait_on_reqs: bool = True,
    ) -> object:
        faults.point(Phase.P2P)
        self._note(Direction.DOWN, tensor_send_next)
        self._note(Direction.UP, tensor_send_prev)
        if self._received is None:
            up = recv_prev or (tensor_send_prev is not None and not recv_next)
            with waited.waiting_for(self.prev_rank if up else self.next_rank):
                return self._exchange(
                    tensor_send_next=tensor_send_next,
                    tensor_send_prev=tensor_send_prev,
                    recv_prev=recv_prev,
                    recv_next=recv_next,
                    tensor_shape=tensor_shape,
                    wait_on_reqs=wait_on_reqs,
                )
        from_previous = self._take(Direction.DOWN) if recv_prev else None
        from_next = self._take(Direction.UP) if recv_next else None
        if wait_on_reqs:
            return from_previous, from_next, None
        sent = {'send_next': tensor_send_next, 'send_prev': tensor_send_prev}
        received = {'recv_prev': from_previous, 'recv_next': from_next}
        requests = {name: _Done() for name, tensor in sent.items() if tensor is not None}
        arriving = {
            name: _Arriving(tensor) for name, tensor in received.items() if tensor is not None
        }
        return from_previous, from_next, requests | arriving

    def _exchange(self, **what: object) -> object:
        """Run upstream's exchange, but wait for the current stream only.

        Upstream waits for all streams of the device, hence also for running captures and log
        copies. The current stream waits for the exchange, and orders all later work after it.
        """
        exchanged = super()._communicate(**what)
        if self._waits:
            torch.cuda.current_stream().synchronize()
        return exchanged

    def _note(self, direction: Direction, tensor: torch.Tensor | None) -> None:
        if self._log is not None and tensor is not None:
            self._log.append(self._iteration, direction, tensor)

    def _take(self, direction: Direction) -> torch.Tensor:
        assert self._received is not None
        sequence = self._sequence[direction]
        self._sequence[direction] += 1
        logged = self._received[direction].take(self._iteration, sequence)
        device = torch.device(torch.cuda.current_device())
        return logged.to(device, non_blocking=True).requires_grad_()


class StagePipeline:
    """A `moevement_ext.recover.trainer.Pipeline` over upstream's. Training thread only."""

    def __init__(self, facts: JobFacts, model: Chunks) -> None:
        self._model = model
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._stages = parallel_state.get_pipeline_model_parallel_world_size()
        self._communicator: BoundaryCommunicator | None = None
        self._groups: Any = None
        self.logged = logged_per_iteration(facts, len(model))

    @property
    def neighbours(self) -> dict[Direction, int | None]:
        communicator = self._logging()
        return {Direction.DOWN: communicator.prev_rank, Direction.UP: communicator.next_rank}

    def receives(self, entry: LedgerEntry) -> dict[Direction, int]:
        return receives_per_iteration(
            self._stage, self._stages, len(self._model), entry.num_microbatches
        )

    def log_to(self, log: UpstreamLog | None) -> None:
        """Replace upstream's communicator in all later iterations."""
        self._communicator = BoundaryCommunicator(
            parallel_state.get_pipeline_model_parallel_group(),
            get_model_config(self._model[0]),
            log,
        )
        self._groups = upstream.groups()

    def replaying(self, received: Mapping[Direction, Received]) -> AbstractContextManager[None]:
        return self._logging().replaying(received)

    def schedule(self, iteration: int) -> dict[str, object]:
        """Keywords for upstream's pipeline schedule in the iteration after `iteration`."""
        if self._communicator is None:
            return {}
        self._communicator.at_iteration(iteration + 1)
        return {'p2p_communicator': self._communicator, 'pg_collection': self._groups}

    def _logging(self) -> BoundaryCommunicator:
        assert self._communicator is not None  # required by localized recovery, the only caller
        return self._communicator


def receives_per_iteration(
    stage: int, stages: int, chunks: int, num_microbatches: int
) -> dict[Direction, int]:
    """Number of tensors that a stage receives in one iteration from before (down) and after (up).

    With virtual pipeline stages the last stage also sends to the next chunk of the first stage, so
    only the very first and the very last chunk lack a neighbour.
    """
    return {
        Direction.DOWN: num_microbatches * (chunks - (stage == 0)),
        Direction.UP: num_microbatches * (chunks - (stage == stages - 1)),
    }


def logged_per_iteration(facts: JobFacts, chunks: int) -> Logged:
    """Upper bounds of what this rank logs in one iteration."""
    stages = facts.pipeline_model_parallel_size
    if stages == 1:
        return NOTHING_LOGGED
    stage = parallel_state.get_pipeline_model_parallel_rank()
    micro_batches = facts.global_batch_size // (facts.micro_batch_size * facts.data_parallel_size)
    received = receives_per_iteration(stage, stages, chunks, micro_batches)
    shards = facts.context_parallel_size
    if facts.sequence_parallel:
        shards *= facts.tensor_model_parallel_size
    elements = facts.seq_length // shards * facts.micro_batch_size * facts.hidden_size
    record = region_bytes(elements * facts.boundary_dtype.itemsize)
    # A stage receives up as much as it sends down, and the other way round.
    return Logged(sum(received.values()) * record, record)
