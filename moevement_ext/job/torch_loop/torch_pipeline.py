# SPDX-License-Identifier: Apache-2.0
"""Transfers between the pipeline stages of a loop on plain torch."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from moevement_ext import faults
from moevement_ext.config import ConfigurationError
from moevement_ext.faults import Phase
from moevement_ext.memory.budget import NOTHING_LOGGED, Logged
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.upstream_log.record import Direction, region_bytes
from moevement_ext.recover.trainer import Received


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
        dist.recv(tensor, source)
        return tensor


def _opposite(direction: Direction) -> Direction:
    return Direction.UP if direction is Direction.DOWN else Direction.DOWN
