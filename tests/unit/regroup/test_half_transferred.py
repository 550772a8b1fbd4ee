# SPDX-License-Identifier: Apache-2.0
"""A peer dies or stops amid a big message or while connecting: no rank waits for it."""

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from moevement_ext.regroup.gloo import Gloo
from moevement_ext.regroup.interruptible_store import InterruptibleStore
from tests.support.forks import context
from tests.support.quick import with_quick
from tests.unit.regroup import ranks
from tests.unit.regroup.ranks import DEADLINE, Failed, Job, cluster

pytestmark = pytest.mark.timed

MIB = 1 << 20
TRIES = 5
"""On a busy machine all of a message can have come before its peer is struck."""
NOT_HALF_WAY = 'was not half-way'
STRIKES = {'kill': signal.SIGKILL, 'stop': signal.SIGSTOP}


@pytest.mark.parametrize('mib', with_quick([64, 192], 64))
@pytest.mark.parametrize('strike', STRIKES)
@pytest.mark.parametrize('operation', ['recv', 'send'])
def test_half_transferred_message_is_not_waited_for(operation: str, strike: str, mib: int) -> None:
    def begin(job: ranks.Cluster) -> None:
        (pid,) = job.all(process_id, ranks=[1])
        job.ranks[1].start(peer_of, operation, mib, strike)
        job.ranks[0].call(get_out_of, operation, mib, strike, pid)

    assert_is_not_waited_for(begin)


@pytest.mark.parametrize(
    'operation', with_quick(['all_reduce', 'reduce_scatter', 'all_gather'], 'reduce_scatter')
)
def test_half_transferred_collective_is_not_waited_for(operation: str) -> None:
    def begin(job: ranks.Cluster) -> None:
        job.ranks[1].start(stop_in_collective, operation)
        job.ranks[0].call(get_out_of_collective, operation)

    assert_is_not_waited_for(begin)


def assert_is_not_waited_for(begin: Callable[[ranks.Cluster], None]) -> None:
    for _ in range(TRIES):
        with cluster(2) as job:
            try:
                begin(job)
            except Failed as error:
                if NOT_HALF_WAY not in str(error):
                    raise
                continue
            return assert_goes_on_with_another(job)
    pytest.fail(f'the message {NOT_HALF_WAY}, {TRIES} times')


def assert_goes_on_with_another(job: ranks.Cluster) -> None:
    job.ranks[1].kill()
    job.replace(1)
    job.renew()
    job.all(ranks.collectives)


def process_id(job: Job) -> int:
    return os.getpid()


def peer_of(job: Job, operation: str, mib: int, strike: str) -> None:
    """The other side, which strikes itself as soon as the first byte has come."""
    data = torch.ones(mib * MIB, dtype=torch.uint8)
    if operation == 'recv':
        work = dist.isend(data, 0)
    else:
        data.zero_()
        work = dist.irecv(data, 0)
        strike_when_moving(data, os.getpid(), strike)
    assert work is not None
    work.wait()


def strike_when_moving(data: torch.Tensor, pid: int, strike: str) -> None:
    first = data[:1].numpy()
    while not first[0]:
        time.sleep(0)
    os.kill(pid, STRIKES[strike])


def get_out_of(job: Job, operation: str, mib: int, strike: str, peer: int) -> None:
    """Have a thread wait, and `unblock`, when the peer was struck half-way."""
    data = torch.ones(mib * MIB, dtype=torch.uint8)
    if operation == 'recv':
        data.zero_()
        work = dist.irecv(data, 1)
        strike_when_moving(data, peer, strike)
    else:
        work = dist.isend(data, 1)
    assert work is not None
    end(job, work.wait)
    if operation == 'recv':
        assert not data.all(), f'it {NOT_HALF_WAY}'


def end(job: Job, wait: Callable[[], Any]) -> None:
    """In half of the deadline; gloo alone takes the group's 77 s, or 30 s."""
    errors: list[str] = []
    waiting = threading.Thread(target=ranks._collect_error, args=(wait, errors), daemon=True)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive() or errors, f'it {NOT_HALF_WAY}'
    job.process_groups.unblock()
    waiting.join(DEADLINE.total_seconds() / 2)
    assert len(errors) == 1, 'it is still waited for' if waiting.is_alive() else 'it returned'


def begin_collective(job: Job, operation: str) -> tuple[Any, torch.Tensor]:
    data = torch.ones(64 * MIB, dtype=torch.uint8)
    if operation == 'all_reduce':
        return dist.all_reduce(data, async_op=True), data
    out = torch.ones((32 if operation == 'reduce_scatter' else 128) * MIB, dtype=torch.uint8)
    if operation == 'reduce_scatter':
        return dist.reduce_scatter_tensor(out, data, async_op=True), out
    data.fill_(2)
    return dist.all_gather_into_tensor(out, data, async_op=True), out


def stop_in_collective(job: Job, operation: str) -> None:
    """As soon as something has come, or soon after it began where that does not show."""
    work, out = begin_collective(job, operation)
    places = [out.numpy()[:1], out.numpy()[out.numel() // 2 :]]
    began = time.monotonic()
    while all(place[0] == 1 for place in places[: 1 if operation == 'all_gather' else 2]):
        if time.monotonic() - began > 0.05:
            break
    os.kill(os.getpid(), signal.SIGSTOP)
    work.wait()


def get_out_of_collective(job: Job, operation: str) -> None:
    work, _ = begin_collective(job, operation)
    end(job, work.wait)


# ---- connecting


def test_peer_that_died_after_publishing_its_address_is_not_awaited() -> None:
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    peer = context().Process(target=publish, args=(store.port,), daemon=True)
    peer.start()
    store.wait(['group/0/1'], DEADLINE)
    peer.kill()
    peer.join()
    before = calling()
    for _ in range(6):
        broken = threading.Event()
        threading.Timer(0.3, broken.set).start()
        mine = InterruptibleStore(PrefixStore('group', store.clone()), broken, DEADLINE)
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            Gloo().connect(mine, 0, 2, DEADLINE, None, DEADLINE, partial(ends, broken), True)
        assert time.monotonic() - began < DEADLINE.total_seconds() / 2
    assert len(calling() - before) <= 6, 'one thread is left for each'


def calling() -> set[threading.Thread]:
    """Threads of calls: late ones, and idle ones."""
    return {thread for thread in threading.enumerate() if thread.name == 'sparse-ckpt-call'}


def ends(broken: threading.Event) -> None:
    if broken.is_set():
        raise RuntimeError('another failure was announced')


def publish(port: int) -> None:
    store = TCPStore('127.0.0.1', port, is_master=False)
    ProcessGroupGloo(PrefixStore('group', store), 1, 2, timedelta(seconds=60))


def test_connecting_ends_in_time_by_itself() -> None:
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        limit = timedelta(seconds=0.5)
        Gloo().connect(store.clone(), 0, 2, DEADLINE, None, limit, int, True)
    assert time.monotonic() - began < DEADLINE.total_seconds() / 2
