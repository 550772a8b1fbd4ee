# SPDX-License-Identifier: Apache-2.0
"""Groups of a backend that fails like NCCL (`nccl_like`): ended, and connected anew."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from moevement_ext.membership.rendezvous import RoundEnded
from moevement_ext.recover.fruitless import in_words
from moevement_ext.recover.localized import LocalizedRecovery
from moevement_ext.regroup import nccl
from moevement_ext.regroup.nccl import _NOT_IN_A_GROUP, Nccl
from moevement_ext.regroup.process_groups import RegroupError
from tests.unit.regroup import ranks
from tests.unit.regroup.ranks import DEADLINE, Failed, Job, cluster

pytestmark = pytest.mark.timed

KILLED = 'the third was killed'


def test_returned_waits_are_recognised_as_undefined() -> None:
    with cluster(3, 'nccl') as job:
        job.ranks[0].start(wait_for_all)
        job.ranks[1].start(wait_for_all)
        job.ranks[2].kill()
        job.store.set(KILLED, '')
        for rank in (0, 1):
            right, may_be_wrong = job.ranks[rank].result()
            assert not right and may_be_wrong
        job.replace(2)
        job.renew()
        job.all(ranks.collectives)
        assert job.all(may_have_returned) == [False] * 3


def wait_for_all(job: Job) -> tuple[bool, bool]:
    """Whether a sum was right, and whether it could have been wrong."""
    works = [
        dist.all_reduce(torch.ones(2), group=job.groups[name], async_op=True)
        for name in ('world', 'all')
    ]
    total = torch.ones(2)
    works.append(dist.all_reduce(total, async_op=True))
    job.store.wait([KILLED])
    job.process_groups.unblock()
    for work in works:
        work.wait()
    job.process_groups.synchronize()
    return total.tolist() == [3, 3], may_have_returned(job)


def may_have_returned(job: Job) -> bool:
    return job.process_groups.waits_returned


def test_nothing_is_committed_once_waits_have_returned() -> None:
    with cluster(2, 'nccl') as job:
        assert job.all(commits) == [True, True]
        job.all(ranks.unblock)
        assert job.all(commits) == [False, False]
        job.renew()
        assert job.all(commits) == [True, True]


def commits(job: Job) -> bool:
    groups = job.process_groups
    membership = SimpleNamespace(
        synchronize=groups.synchronize, waits_returned=groups.waits_returned
    )
    try:
        LocalizedRecovery.committing(SimpleNamespace(_membership=membership))  # type: ignore[arg-type]
    except RoundEnded:
        return False
    return True


@pytest.mark.parametrize('at_once', [True, False])
def test_groups_that_hang_are_aborted_at_once(at_once: bool) -> None:
    timeout = 2 * DEADLINE if at_once else timedelta(seconds=1)
    with cluster(2, 'nccl') as job:
        seconds = job.ranks[0].call(seconds_to_abort, at_once, timeout)
        assert seconds < timeout.total_seconds() if at_once else seconds >= timeout.total_seconds()


def seconds_to_abort(job: Job, at_once: bool, timeout: timedelta) -> float:
    for group in job.groups.values():
        backend: Any = group._get_backend(torch.device('cpu'))
        backend.options._timeout = timeout
    works = [dist.irecv(torch.zeros(1), 1, job.groups[name]) for name in ('world', '0,1')]
    if not at_once:
        one_after_the_other(job)
    began = time.monotonic()
    job.process_groups.unblock()
    seconds = time.monotonic() - began
    for work in works:
        assert work is not None and work.wait()
    return seconds


def one_after_the_other(job: Job) -> None:
    kind: Any = job.process_groups._kinds['nccl']
    close = kind.close
    kind.close = lambda backends: [close([backend]) for backend in backends]


def leave_calls_open(job: Job) -> None:
    kind: Any = job.process_groups._kinds['nccl']
    kind.end_calls = lambda: None


@pytest.mark.parametrize('closed', [True, False])
def test_groups_around_a_send_that_fails_are_closed(closed: bool) -> None:
    """NCCL itself reports the lost peer: one group more is open than torch knows of."""
    with cluster(3, 'nccl') as job:
        job.ranks[2].kill()
        for rank in (0, 1):
            job.ranks[rank].call(send_to_the_lost, closed)
        job.replace(2)
        job.renew()
        if closed:
            assert job.all(ranks.all_reduce, 'all') == [6, 6, 6]
        else:  # theirs is only noted, and the third would wait for it
            found = [job.ranks[rank].call(ranks.all_reduce, 'all') for rank in (0, 1)]
            assert found == [1, 2]


def send_to_the_lost(job: Job, closed: bool) -> None:
    sent, peer = torch.zeros(1), 2
    operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, sent.clone(), peer)]
    with pytest.raises(dist.DistBackendError, match='remote process exited'):
        while True:
            dist.batch_isend_irecv(operations)
    if not closed:
        leave_calls_open(job)
    job.process_groups.end_calls()
    job.process_groups.unblock()


def test_all_groups_of_calls_of_a_thread_are_closed_regardless_of_torchs_count() -> None:
    calls = Nccl()
    library = calls._library
    for opened, counted in ((2, 1), (1, 1), (1, 0), (0, 1), (0, 0)):
        for _ in range(opened):
            assert library.ncclGroupStart() == 0
        calls._count().value = counted
        calls.end_calls()
        assert library.ncclGroupEnd() == _NOT_IN_A_GROUP
        assert calls._count().value == 0


def test_groups_of_calls_of_a_backward_pass_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients on a GPU have a thread of their own."""
    calls = Nccl()
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 3)
    with ThreadPoolExecutor(1) as gradients:
        seen = []

        def there(device: torch.device, call: Any) -> None:
            seen.append(device)
            gradients.submit(call).result(DEADLINE.total_seconds())

        monkeypatch.setattr(nccl, '_on_gradient_thread', there)
        assert gradients.submit(calls._library.ncclGroupStart).result() == 0
        calls.end_calls()
        assert gradients.submit(calls._library.ncclGroupEnd).result() == _NOT_IN_A_GROUP
        assert seen == [torch.device('cuda', 3)]


def test_calls_are_made_in_a_backward_pass() -> None:
    made: list[int] = []
    with torch.no_grad():
        nccl._on_gradient_thread(
            torch.device('cpu'), lambda: made.append(torch._C._current_graph_task_id())
        )
    assert len(made) == 1 and made[0] >= 0


def test_lost_gpu_is_left_to_the_check_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    monkeypatch.setattr(nccl, '_on_gradient_thread', Mock(side_effect=RuntimeError('lost')))
    for device in (Mock(return_value=0), Mock(side_effect=RuntimeError('lost'))):
        monkeypatch.setattr(torch.cuda, 'current_device', device)
        Nccl().end_calls()


def test_communicator_without_memory_fails_in_words_and_can_be_made_later() -> None:
    with cluster(2, 'nccl') as job:
        job.all(ranks.unblock)
        prefix = job.fresh_prefix()
        job.ranks[0].start(renew_without_memory, prefix)
        job.ranks[1].start(renew_on_own_connection, prefix, 1.0)
        assert job.ranks[0].result() == (
            "RegroupError: no GPU memory for a communicator: Cuda failure 2 'out of memory'"
        )
        with pytest.raises(Failed, match='RegroupError'):
            job.ranks[1].result()
        job.renew()
        job.all(ranks.collectives)


def renew_without_memory(job: Job, prefix: str) -> str:
    backend: Any = dist.ProcessGroupNCCL
    create = backend.eager_connect_single_device

    def fail(*args: Any) -> None:
        backend.eager_connect_single_device = create
        raise dist.DistBackendError(
            "unhandled cuda error, NCCL version 2.28.9\nLast error:\nCuda failure 2 'out of memory'"
        )

    backend.eager_connect_single_device = fail
    with pytest.raises(RegroupError) as raised:
        ranks.renew(job, prefix)
    return in_words(raised.value)


def test_only_communicators_that_a_member_has_used_are_made_again() -> None:
    with cluster(3, 'nccl', used=False) as job:
        job.all(ranks.all_reduce, 'world')
        job.all(ranks.all_reduce, '0,1', ranks=(0, 1))
        for rank in (0, 2):
            job.ranks[rank].kill()
            job.replace(rank)
        job.ranks[1].call(ranks.unblock)
        job.ranks[1].call(silence, job.fresh_prefix())
        job.renew()
        assert job.all(made) == [{'world', '0,1'}, {'world', '0,1'}, {'world'}]
        job.all(ranks.collectives)


def silence(job: Job, prefix: str) -> None:
    """As a survivor does before it enters its loop again."""
    job.process_groups.renew(PrefixStore(prefix, job.store), (), DEADLINE)


def made(job: Job) -> set[str]:
    """Groups of several ranks whose communicator is there."""
    found = set()
    for name, group in job.groups.items():
        backend: Any = group._get_backend(torch.device('cpu'))
        if group.size() > 1 and backend._is_initialized():
            found.add(name)
    return found


def test_missing_member_is_an_error_in_time() -> None:
    with cluster(3, 'nccl') as job:
        prefix = job.fresh_prefix()
        for rank in (0, 1):
            job.ranks[rank].start(renew_on_own_connection, prefix, 0.5)
        for rank in (0, 1):
            with pytest.raises(Failed, match='RegroupError: Not all of 3 ranks began'):
                job.ranks[rank].result()
        job.renew()
        job.all(ranks.collectives)


def renew_on_own_connection(job: Job, prefix: str, seconds: float) -> None:
    """The thread that is left behind goes on waiting in the store."""
    store = PrefixStore(prefix, job.store.clone())
    job.process_groups.renew(store, None, timedelta(seconds=seconds))


class ProcessGroupNCCL2(dist.ProcessGroupGloo):
    """Has the name of a class that cannot be connected anew."""


def test_backend_of_another_design_is_refused_with_the_remedy() -> None:
    with cluster(1) as job, pytest.raises(Failed, match='SparseCheckpoint.*DIST_USE_NCCL2=0'):
        job.ranks[0].call(kind_of_another_design)


def kind_of_another_design(job: Job) -> None:
    backend = ProcessGroupNCCL2(dist.HashStore(), 0, 1, DEADLINE)
    job.process_groups._kind_name((0,), [backend])
