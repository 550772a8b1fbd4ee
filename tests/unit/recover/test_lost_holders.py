# SPDX-License-Identifier: Apache-2.0
"""The only holder of a lost window is gone when the window is fetched."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from moevement_ext.faults import Phase
from moevement_ext.membership.membership import Membership
from moevement_ext.memory.window.directory import TRIES
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.name import Window
from moevement_ext.replicate.host_memory import HostMemory
from tests.unit.memory.samples import tmpfs_directory
from tests.unit.recover.threaded_job import OF_THREADS, WINDOW, Fault, Process, ThreadedJob

VICTIM = 1
ITERATIONS = 4 * WINDOW

pytestmark = [pytest.mark.timed, *OF_THREADS]


class LostHolder:
    """Its server ends when the replica is first asked for.

    Args:
        dies: so does its process, once that has been noticed; else it goes on.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
        self.asked = 0
        process: Process | None = None
        fetch, leave = HostMemory.fetch, Membership.leave

        def fetch_from_it(
            memory: HostMemory, window: Window, rank: int, *others: Any
        ) -> WindowFile:
            nonlocal process
            self.asked += 1
            if self.asked == 1:
                process = of_rank(rank)
                memory_of(process).server.stop()
            return fetch(memory, window, rank, *others)

        def leave_when_it_is_dead(membership: Membership, reason: str) -> None:
            nonlocal dies
            if dies and process is not None:
                dies = False
                process.kill()
            leave(membership, reason)

        monkeypatch.setattr(HostMemory, 'fetch', fetch_from_it)
        monkeypatch.setattr(Membership, 'leave', leave_when_it_is_dead)


def of_rank(rank: int) -> Process:
    found = (thread for thread in threading.enumerate() if thread.name == f'rank {rank}')
    return next(found).process  # type: ignore[attr-defined]


def memory_of(process: Process) -> HostMemory:
    assert process.protected is not None and process.protected.protection is not None
    return process.protected.protection.memory


@pytest.fixture
def lose_holder(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[bool], tuple[LostHolder, ThreadedJob]]:
    """Runs a job in which the victim's node is lost, and then the holder of its replica."""

    def run(dies: bool) -> tuple[LostHolder, ThreadedJob]:
        with tmpfs_directory() as directory:
            undisturbed = ThreadedJob(directory, ITERATIONS)
            undisturbed.run()
        holder = LostHolder(monkeypatch, dies)
        fault = Fault(VICTIM, Phase.FORWARD, 2 * WINDOW + 1, node_lost=True)
        with tmpfs_directory() as directory:
            job = ThreadedJob(directory, ITERATIONS, [fault], undisturbed.states)
            job.run()
        return holder, job

    return run


def test_dead_holder_is_asked_again_after_the_next_rendezvous(
    lose_holder: Callable[[bool], tuple[LostHolder, ThreadedJob]],
) -> None:
    holder, job = lose_holder(True)
    assert holder.asked == 2
    assert job.restarts == 0
    assert {event.scope for event in job.recovered} == {'localized'}


def test_silent_holder_is_asked_a_limited_number_of_times(
    lose_holder: Callable[[bool], tuple[LostHolder, ThreadedJob]],
) -> None:
    holder, job = lose_holder(False)
    assert holder.asked == TRIES + 1, 'the last one by the whole job'
    assert job.restarts == 1
