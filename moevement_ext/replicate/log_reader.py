# SPDX-License-Identifier: Apache-2.0
"""Prefetches a neighbour's log records for a replay (paper sec. 3.4)."""

import math
import threading
from collections import deque
from collections.abc import Sequence

import torch

from moevement_ext.errors import SparseCheckpointError
from moevement_ext.memory.tensors import dtype_of
from moevement_ext.memory.upstream_log.record import CorruptLog, Direction, LoggedTensor, LogKey
from moevement_ext.replicate.client import PeerLost, PeerRefused, ReplicaClient
from moevement_ext.replicate.connection import join_interrupted

MAX_BYTES_AHEAD = 256 * 2**20


class ReaderClosed(SparseCheckpointError):
    """A reader of a log or window was closed while, or before, something was taken from it."""


class LogReader:
    """All records of one direction from one neighbour, fetched in order on a background thread.

    The replaying thread calls `take`; any thread may call `close`.

    Args:
        client: client of the neighbour; the reader owns and closes it.
        direction: direction in which the neighbour sent the tensors.
        counts: iterations in ascending order, each with its number of tensors.
        max_bytes: limit of prefetched bytes; host memory holds at most one record more.
    """

    def __init__(
        self,
        client: ReplicaClient,
        direction: Direction,
        counts: Sequence[tuple[int, int]],
        max_bytes: int = MAX_BYTES_AHEAD,
    ) -> None:
        self._client = client
        self._direction = direction
        self._max_bytes = max_bytes
        keys = [LogKey(t, direction, sequence) for t, n in counts for sequence in range(n)]
        self._to_take = deque(keys)
        self._fetched: deque[tuple[torch.Tensor, int]] = deque()
        self._bytes_ahead = 0
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._run, args=(keys,), name=f'log-reader-{direction}', daemon=True
        )
        self._thread.start()

    def take(self, iteration: int, sequence: int, timeout_s: float | None = None) -> torch.Tensor:
        """Wait for the next tensor, on the CPU; the caller owns its memory.

        `sequence` is the index among the tensors sent in that iteration, from 0. Raises
        `ReaderClosed`, also while waiting; `PeerLost`, `PeerRefused` or `CorruptLog`, now and in
        all later calls, if the neighbour cannot deliver the tensor; `TimeoutError` after
        `timeout_s`, when the call may be repeated; `ValueError` if it is not the next in order.
        """
        key = LogKey(iteration, self._direction, sequence)
        with self._changed:
            if not self._to_take or self._to_take[0] != key:
                expected = self._to_take[0] if self._to_take else 'nothing more'
                raise ValueError(f'{key} is taken out of order, expected was {expected}')
            self._changed.wait_for(lambda: self._fetched or self._error, timeout_s)
            if not self._fetched:
                raise self._error or TimeoutError(
                    f'{key} has not come from {self._neighbour} within {timeout_s:g} s'
                )
            tensor, nbytes = self._fetched.popleft()
            self._to_take.popleft()
            self._bytes_ahead -= nbytes
            self._changed.notify_all()
        return tensor

    def close(self) -> None:
        """End the thread and wake up a waiting `take`."""
        with self._changed:
            self._fetched.clear()
            self._error = ReaderClosed(f'the reader of {self._neighbour} was closed')
            self._changed.notify_all()
        join_interrupted(self._thread, self._client.interrupt)

    @property
    def _neighbour(self) -> str:
        host, port = self._client.address
        return f'the log sent {self._direction} by {host}:{port}'

    def _run(self, keys: Sequence[LogKey]) -> None:
        try:
            for key in keys:
                if not self._fetch(key):
                    break
        except (PeerLost, PeerRefused, CorruptLog) as error:
            self._fail(type(error)(f'{self._neighbour} cannot deliver {key}: {error}'))
        except Exception as error:  # e.g. no memory: `take` must raise it
            self._fail(error)
        finally:
            self._client.close()

    def _fetch(self, key: LogKey) -> bool:
        """Fetch one record, without a timeout; False if the reader was closed."""
        while self._may_go_on():
            reply = self._client.fetch_log(key)  # the neighbour waits a moment for the record
            if reply is None:
                continue
            tensor, nbytes = _as_tensor(*reply), len(reply[1])
            with self._changed:
                if self._error is None:
                    self._fetched.append((tensor, nbytes))
                    self._bytes_ahead += nbytes
                    self._changed.notify_all()
            return True
        return False

    def _may_go_on(self) -> bool:
        """Wait until there is room for another record; False if the reader was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes_ahead < self._max_bytes or self._error)
            return self._error is None

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error  # an interrupted exchange only repeats the first
            self._changed.notify_all()


def _as_tensor(logged: LoggedTensor, data: bytearray) -> torch.Tensor:
    """Tensor over the memory of `data`, without a copy."""
    dtype = dtype_of(logged.dtype)
    if dtype is None:
        raise CorruptLog(f'unknown dtype {logged.dtype!r}')
    if math.prod(logged.shape) * dtype.itemsize != len(data):
        raise CorruptLog(f'{len(data)} bytes do not make {dtype} of shape {logged.shape}')
    try:
        if not data:
            return torch.empty(logged.shape, dtype=dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(logged.shape)
    except (RuntimeError, OverflowError, TypeError) as error:  # sizes beyond torch's integers
        raise CorruptLog(f'no tensor has the shape {logged.shape}') from error
