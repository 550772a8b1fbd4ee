# SPDX-License-Identifier: Apache-2.0
"""Records of a log, fetched one by one and ahead."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from moevement_ext.memory.upstream_log.log import UpstreamLog
from moevement_ext.memory.upstream_log.record import CorruptLog, Direction, LoggedTensor, LogKey
from moevement_ext.replicate.client import (
    LogReader,
    PeerLost,
    PeerRefused,
    ReaderClosed,
    ReplicaClient,
)
from moevement_ext.replicate.replica_server import ReplicaServer
from tests.distributed.harness.ports import free_port
from tests.unit.memory.samples import SECRET
from tests.unit.replicate.peers import DEADLINE_S, HOLDER, logging, serving, silent_peer, wait_for

pytestmark = pytest.mark.timed

DOWN, UP = Direction.DOWN, Direction.UP


@pytest.fixture
def log(shm: Path, server: ReplicaServer) -> Iterator[UpstreamLog]:
    with logging(shm / 'log') as log:
        server.serve_log(log)
        yield log


type OpenReader = Callable[..., LogReader]


class Noting(ReplicaClient):
    """The real client, which also notes what it was asked for."""

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(address, SECRET, DEADLINE_S)
        self.asked: list[LogKey] = []
        self.on_answer: Callable[[], None] = lambda: None

    def fetch_log(self, key: LogKey) -> tuple[LoggedTensor, bytearray] | None:
        self.asked.append(key)
        reply = super().fetch_log(key)
        self.on_answer()
        return reply


@pytest.fixture
def noting(server: ReplicaServer) -> Noting:
    return Noting(server.address)


@pytest.fixture
def open_reader() -> Iterator[OpenReader]:
    readers = []

    def open_one(*args: object, **options: object) -> LogReader:
        readers.append(LogReader(*args, **options))  # type: ignore[arg-type]
        return readers[-1]

    yield open_one
    for reader in readers:
        reader.close()
        assert not reader._thread.is_alive()


def test_all_records_arrive_in_order(
    log: UpstreamLog, noting: Noting, open_reader: OpenReader
) -> None:
    dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.float8_e4m3fn]
    sent = {}
    for iteration, number in ((4, 2), (5, 0), (6, len(dtypes))):
        for sequence in range(number):
            tensor = torch.randn(iteration, sequence, 3).to(dtypes[sequence])
            log.append(iteration, UP, tensor)
            log.append(iteration, DOWN, torch.zeros(1))
            sent[iteration, sequence] = tensor
    reader = open_reader(noting, UP, [(4, 2), (5, 0), (6, len(dtypes))])
    for (iteration, sequence), tensor in sent.items():
        taken = reader.take(iteration, sequence, DEADLINE_S)
        assert (taken.dtype, taken.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(taken.float(), tensor.float())
        taken.zero_()  # the caller owns it
    with pytest.raises(ValueError, match='expected was nothing more'):
        reader.take(7, 0, DEADLINE_S)
    reader._thread.join(DEADLINE_S)
    assert not reader._thread.is_alive(), 'all was fetched'


def test_a_scalar_keeps_its_shape(
    log: UpstreamLog, noting: Noting, open_reader: OpenReader
) -> None:
    log.append(1, DOWN, torch.tensor(2.5))
    assert torch.equal(open_reader(noting, DOWN, [(1, 1)]).take(1, 0), torch.tensor(2.5))


def test_taking_out_of_order_is_an_error(
    log: UpstreamLog, noting: Noting, open_reader: OpenReader
) -> None:
    for iteration in (1, 2):
        log.append(iteration, DOWN, torch.full((1,), iteration))
    reader = open_reader(noting, DOWN, [(1, 1), (2, 1)])
    with pytest.raises(ValueError, match='tensor 0 sent down in iteration 2 is taken out of order'):
        reader.take(2, 0, DEADLINE_S)
    assert reader.take(1, 0, DEADLINE_S).item() == 1
    with pytest.raises(ValueError, match='expected was tensor 0 sent down in iteration 2'):
        reader.take(1, 0, DEADLINE_S)
    assert reader.take(2, 0, DEADLINE_S).item() == 2


def test_reader_waits_for_a_replaying_neighbour(
    log: UpstreamLog, noting: Noting, open_reader: OpenReader
) -> None:
    asked_again = threading.Event()
    noting.on_answer = lambda: asked_again.set() if len(noting.asked) > 1 else None
    reader = open_reader(noting, DOWN, [(1, 1)])
    with pytest.raises(TimeoutError, match='tensor 0 sent down in iteration 1 has not come from'):
        reader.take(1, 0, 0.01)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(reader.take, 1, 0, DEADLINE_S)
        assert asked_again.wait(DEADLINE_S)
        log.append(1, DOWN, torch.full((1,), 5))
        assert taking.result(DEADLINE_S).item() == 5


def test_no_more_is_fetched_ahead_than_allowed(
    log: UpstreamLog, noting: Noting, open_reader: OpenReader
) -> None:
    for sequence in range(6):
        log.append(1, DOWN, torch.full((1,), sequence))
    reader = open_reader(noting, DOWN, [(1, 6)], max_bytes=10)

    def fetched() -> int:
        return taken + len(reader._fetched)

    for taken in range(6):
        expected = min(taken + 2, 6)
        wait_for(lambda: fetched() == expected)  # noqa: B023 (called before the next turn)
        assert len(noting.asked) == expected
        assert reader.take(1, taken, DEADLINE_S).item() == taken


def test_a_lost_neighbour_is_named(open_reader: OpenReader) -> None:
    port = free_port()
    reader = open_reader(ReplicaClient(('127.0.0.1', port), SECRET, DEADLINE_S), DOWN, [(1, 2)])
    for _ in range(2):
        with pytest.raises(PeerLost, match=f'log sent down by 127.0.0.1:{port} cannot deliver'):
            reader.take(1, 0, DEADLINE_S)


def test_records_before_the_loss_can_be_taken(shm: Path, open_reader: OpenReader) -> None:
    with serving(shm, HOLDER) as server, logging(shm / 'log') as log:
        server.serve_log(log)
        log.append(1, DOWN, torch.full((1,), 7))
        noting = Noting(server.address)
        reader = open_reader(noting, DOWN, [(1, 2)])
        wait_for(lambda: len(noting.asked) > 1)
    reader._thread.join(DEADLINE_S)
    assert reader.take(1, 0, DEADLINE_S).item() == 7
    with pytest.raises((PeerLost, PeerRefused), match='tensor 1 sent down in iteration 1'):
        reader.take(1, 1, DEADLINE_S)


def test_a_gap_is_raised_with_its_reason(
    log: UpstreamLog, noting: Noting, open_reader: OpenReader
) -> None:
    log.append(3, DOWN, torch.ones(1))
    reader = open_reader(noting, DOWN, [(2, 1)])
    with pytest.raises(PeerRefused, match='127.0.0.1.*iteration 2 is gone, the log begins with 3'):
        reader.take(2, 0, DEADLINE_S)


@pytest.mark.parametrize(
    ('logged', 'reason'),
    [
        (LoggedTensor('nn', (4,), 4, 0), "unknown dtype 'nn'"),
        (LoggedTensor('float32', (3,), 4, 0), '4 bytes do not make torch.float32 of shape'),
    ],
)
def test_record_without_a_tensor_is_refused(
    open_reader: OpenReader, logged: LoggedTensor, reason: str
) -> None:
    class Odd(ReplicaClient):
        def fetch_log(self, key: LogKey) -> tuple[LoggedTensor, bytearray] | None:
            return logged, bytearray(4)

    reader = open_reader(Odd(('127.0.0.1', 1), SECRET), DOWN, [(1, 1)])
    with pytest.raises(CorruptLog, match=f'cannot deliver tensor 0 .*{reason}'):
        reader.take(1, 0, DEADLINE_S)


def test_close_wakes_a_waiting_take(
    log: UpstreamLog, noting: Noting, open_reader: OpenReader
) -> None:
    log.append(1, DOWN, torch.ones(1))
    reader = open_reader(noting, DOWN, [(1, 2)])
    reader.take(1, 0, DEADLINE_S)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(reader.take, 1, 1, 1000)
        reader.close()
        with pytest.raises(ReaderClosed):
            taking.result(DEADLINE_S)
    with pytest.raises(ReaderClosed):
        reader.take(1, 1, DEADLINE_S)
    assert not reader._thread.is_alive()


def test_close_ends_an_exchange_with_a_silent_neighbour(open_reader: OpenReader) -> None:
    with silent_peer(greets=True) as address:
        client = ReplicaClient(address, SECRET, timeout_s=1000)
        reader = open_reader(client, DOWN, [(1, 1)])
        wait_for(lambda: client._connection is not None)
        reader.close()
        assert not reader._thread.is_alive()
        with pytest.raises(ReaderClosed):
            reader.take(1, 0, DEADLINE_S)
