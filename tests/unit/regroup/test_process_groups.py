# SPDX-License-Identifier: Apache-2.0
"""Process groups of real processes: unblocked, and connected anew inside the same objects."""

import threading
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, PrefixStore, TCPStore

from moevement_ext.regroup.interruptible_store import InterruptibleStore
from tests.unit.regroup import ranks
from tests.unit.regroup.ranks import Failed, Job, Rank, cluster

pytestmark = pytest.mark.timed

MIB = 1 << 20


def error_of(rank: Rank) -> str:
    with pytest.raises(Failed) as caught:
        rank.result()
    return str(caught.value)


# ---- unblock


def test_wait_for_a_live_peer_ends() -> None:
    with cluster(2) as job:
        for operation in ('recv', 'all_reduce', 'barrier', 'all_gather'):
            job.ranks[0].call(ranks.end_by_unblocking, operation, 1)
            job.ranks[0].call(ranks.unblock)
            assert job.ranks[0].call(ranks.errors_of_operations)
            job.ranks[1].call(ranks.unblock)
            job.renew()
        job.all(ranks.collectives)


def test_unblock_and_renew_take_up_groups_made_later() -> None:
    with cluster(2) as job:
        job.all(make_group)
        job.ranks[0].call(ranks.end_by_unblocking, 'recv', 1)
        job.ranks[0].call(ranks.errors_of_operations)
        job.renew()
        job.all(ranks.all_reduce, 'later')
        job.all(make_group)
        assert job.all(ranks.all_reduce, 'later') == [3, 3]
        job.renew()
        assert job.all(ranks.all_reduce, 'later') == [3, 3]


def make_group(job: Job) -> None:
    group = dist.new_group()
    assert group is not None
    job.groups['later'] = group


# ---- renew


def test_replacement_with_fake_groups_joins_survivors() -> None:
    with cluster(3) as job:
        for lost in (1, 0):
            survivors = [rank for rank in range(3) if rank != lost]
            for rank in survivors:
                job.ranks[rank].start(ranks.all_reduce, 'world')
            job.ranks[lost].kill()
            for rank in survivors:
                assert 'RuntimeError' in error_of(job.ranks[rank])
            job.all(ranks.unblock, ranks=survivors)
            job.all(ranks.errors_of_operations, ranks=survivors)
            job.replace(lost)
            job.renew()
            job.all(ranks.collectives)
            assert job.all(ranks.operation_timeouts) == [{ranks.OPERATION_TIMEOUT}] * 3
        replacement, survivor = job.all(ranks.backends, ranks=(1, 2))
        assert replacement['world'] == survivor['world']


def test_groups_that_are_not_inside_become_fake() -> None:
    with cluster(3) as job:
        members = [0, 1]
        job.renew(members)
        for rank in members:
            backends = job.ranks[rank].call(ranks.backends)
            real = {name for name, (backend, *_) in backends.items() if backend == 'gloo'}
            fake = {name: all for name, all in backends.items() if name not in real}
            assert real == {'0,1', str(rank)}
            assert set(fake.values()) == {('fake', 'cpu:fake,cuda:fake', 'FakeProcessGroup')}
        # No other rank takes part, nothing changes, nothing waits.
        assert [job.ranks[rank].call(ranks.all_reduce, 'world') for rank in members] == [1, 2]
        assert job.ranks[0].call(ranks.all_reduce, '0,2') == 1
        assert job.all(ranks.all_reduce, '0,1', ranks=members) == [3, 3]
        job.renew()
        job.all(ranks.collectives)


def test_peer_of_a_member_that_gave_up_does_not_wait() -> None:
    with cluster(3) as job:
        prefix = job.fresh_prefix()
        job.ranks[0].start(renew_until_told, prefix)
        job.ranks[1].call(ranks.renew, prefix, [0, 1])
        job.store.set(f'{prefix}/told', '')
        job.ranks[1].start(ranks.all_reduce, '0,1')
        assert 'RuntimeError' in error_of(job.ranks[1])
        assert error_of(job.ranks[0]).startswith('RegroupError: The process group of ranks 0, ')


class Withdrawing:
    """A connection to a store, in which a key is deleted as soon as it has been seen, once."""

    def __init__(self, store: TCPStore) -> None:
        self.store = store
        self.compare_set = store.compare_set
        self.withdrawn = threading.Event()

    def check(self, keys: list[str]) -> bool:
        found = self.store.check(keys)
        if found and not self.withdrawn.is_set():
            self.store.delete_key(keys[0])
            self.withdrawn.set()
        return found

    def get(self, key: str) -> bytes:
        return self.store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self.store.multi_get(keys)


@pytest.mark.parametrize('read', ['get', 'multi_get'])
def test_withdrawn_address_blocks_no_connection(read: str) -> None:
    """A member that gives up deletes its address, maybe just when another one has seen it."""
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    store.set('address', 'withdrawn')
    connection, interrupted = Withdrawing(store), threading.Event()
    waiting = InterruptibleStore(connection, interrupted, ranks.DEADLINE)  # type: ignore[arg-type]
    results: list[object] = []

    def connect() -> None:
        try:
            results.append(getattr(waiting, read)('address' if read == 'get' else ['address']))
        except ConnectionError as error:
            results.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    assert connection.withdrawn.wait(ranks.DEADLINE.total_seconds())
    interrupted.set()
    thread.join(ranks.DEADLINE.total_seconds() / 2)
    assert [type(found) for found in results] == [ConnectionError]
    assert not store.check(['address'])  # answered on the same connection


def test_unblock_during_renew_ends_it() -> None:
    with cluster(2) as job:
        job.ranks[0].start(renew_and_unblock, job.fresh_prefix())  # the other rank does not come
        assert 'unblock() was called' in error_of(job.ranks[0])
        prefix = job.fresh_prefix()
        job.ranks[0].start(renew_and_unblock, prefix)
        job.store.wait([f'{prefix}/unblocked'], ranks.DEADLINE)
        # Only now does the other rank come; what it connected to is closed.
        job.ranks[1].start(ranks.renew, prefix, None, 1.0)
        assert 'unblock() was called' in error_of(job.ranks[0])
        assert_no_use(job.ranks[1])
        job.renew()
        job.all(ranks.collectives)


def renew_until_told(job: Job, prefix: str) -> None:
    interrupted = threading.Event()
    store = job.store.clone()  # the other connection is busy while it waits

    def wait() -> None:
        store.wait([f'{prefix}/told'], ranks.DEADLINE)
        interrupted.set()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        found = InterruptibleStore(PrefixStore(prefix, job.store), interrupted, ranks.DEADLINE)
        job.process_groups.renew(found, None, ranks.DEADLINE)
    finally:
        thread.join()


def renew_and_unblock(job: Job, prefix: str) -> None:
    """Unblock from a thread as soon as renewing waits for the other rank."""
    store = job.store.clone()  # the other connection is busy while it waits
    keys = store.num_keys()

    def unblock() -> None:
        while store.num_keys() == keys:
            pass
        job.process_groups.unblock()
        store.set(f'{prefix}/unblocked', '')

    thread = threading.Thread(target=unblock)
    thread.start()
    try:
        ranks.renew(job, prefix)
    finally:
        thread.join()


def assert_no_use(rank: Rank) -> None:
    try:
        rank.result()
    except Failed as error:
        assert 'RegroupError' in str(error)
    else:
        rank.call(ranks.errors_of_operations)


def test_broken_off_coalescing_is_forgotten() -> None:
    with cluster(2) as job:
        job.all(break_off_coalescing)
        job.renew()
        assert job.all(coalesced_sums) == [[3, 30]] * 2


def break_off_coalescing(job: Job) -> None:
    try:
        with dist._coalescing_manager():
            dist.all_reduce(torch.zeros(1))
            raise RuntimeError('fault')
    except RuntimeError:
        pass


def coalesced_sums(job: Job) -> list[float]:
    tensors = [torch.tensor([factor * (job.rank + 1.0)]) for factor in (1, 10)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    return [tensor.item() for tensor in tensors]


def test_repeated_renewals_leak_nothing() -> None:
    with cluster(2) as job:
        before = job.all(ranks.cycles, 'warm-up', 10)
        keys = job.store.num_keys()
        after = job.all(ranks.cycles, 'cycle', 50)
        for first, last in zip(before, after, strict=True):
            # What is left of the last cycle may be about to end; of each it would be 50.
            assert last['file descriptors'] < first['file descriptors'] + 25
            assert last['threads'] < first['threads'] + 25
            assert last['memory'] - first['memory'] < 4 * MIB
        assert job.store.num_keys() == keys


@pytest.mark.parametrize('backend', ['gloo', 'nccl'])
def test_replay_continues_while_other_ranks_reconnect(backend: str) -> None:
    with cluster(4, backend) as job:
        job.all(ranks.unblock)
        if backend == 'gloo':
            job.all(ranks.errors_of_operations)
        connect_in_parts(job, [0, 1], [2, 3])
        assert job.all(ranks.all_reduce, '0,1', ranks=(0, 1)) == [3, 3]
        assert job.all(ranks.all_reduce, '2,3', ranks=(2, 3)) == [7, 7]
        job.all(keep_backend, '0,1', ranks=(0, 1))
        job.ranks[3].kill()
        job.ranks[2].call(ranks.unblock)
        job.replace(3)
        connect_in_parts(job, [2], [3])
        assert job.all(ranks.all_reduce, '0,1', ranks=(0, 1)) == [3, 3]
        connect_in_parts(job, [0, 1], [2], [3], rest=True)
        assert job.all(is_kept, '0,1', ranks=(0, 1)) == [True, True]
        job.all(ranks.collectives)
        # They end with the others.
        job.all(ranks.unblock)
        if backend == 'gloo':
            assert job.all(ranks.errors_of_operations)
        job.renew()
        assert job.all(is_kept, '0,1', ranks=(0, 1)) == [False, False]
        job.all(ranks.collectives)


def connect_in_parts(job: ranks.Cluster, *parts: list[int], rest: bool = False) -> None:
    """Each part by itself, at the same time; or all with all, but within each part."""
    prefix = job.fresh_prefix()
    for part in parts:
        for rank in part:
            given = (prefix, None, 45, part) if rest else (f'{prefix}/{part[0]}', part)
            job.ranks[rank].start(ranks.renew, *given)
    for part in parts:
        for rank in part:
            job.ranks[rank].result()


_kept: dict[str, Any] = {}
"""Backends of this process, by group."""


def keep_backend(job: Job, name: str) -> None:
    _kept[name] = job.groups[name]._get_backend(torch.device('cpu'))


def is_kept(job: Job, name: str) -> bool:
    return job.groups[name]._get_backend(torch.device('cpu')) is _kept[name]


def test_addresses_behind_a_lost_connection_are_left() -> None:
    with cluster(1) as job:
        job.ranks[0].call(forget_unreachable_addresses)


def forget_unreachable_addresses(job: Job) -> None:
    kind = Mock(forget=Mock(side_effect=DistNetworkError('the connection is lost')))
    job.process_groups._addresses = [(kind, Mock(), 0)]
    ranks.renew(job, 'after')
    kind.forget.assert_called_once()
