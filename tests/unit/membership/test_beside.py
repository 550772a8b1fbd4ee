# SPDX-License-Identifier: Apache-2.0
"""A replaying rank joins a rendezvous on another thread while its training thread continues."""

import threading
from collections.abc import Iterator, Sequence

import pytest

from moevement_ext.membership.membership import Membership
from moevement_ext.membership.rendezvous import end_round
from moevement_ext.membership.rendezvous_runner import Beside
from moevement_ext.membership.report import Report
from tests.unit.membership.test_membership import WORLD, Job, job, survivor, wait_until

__all__ = ['job']  # a fixture

pytestmark = pytest.mark.timed


@pytest.fixture
def members(job: Job) -> Iterator[list[Membership]]:
    """All are set up; the first member will replay."""
    found = [future.result() for future in [job.start(rank) for rank in range(WORLD)]]
    for member in found:
        member.settle()
    yield found
    for member in found:
        member._joined.watch.stop()


class Replay(Beside):
    """Replay of the first rank; records the reports it receives."""

    def __init__(self, member: Membership, goes_on: bool = True) -> None:
        self.heard: list[int] = []

        def hears(reports: Sequence[Report]) -> bool:
            self.heard.append(len(reports))
            return goes_on

        super().__init__(lambda: survivor(member.origin), hears)


def test_rank_that_fails_while_meeting_beside_leaves_that_round(
    job: Job, members: list[Membership]
) -> None:
    first = members[0]
    leaving, watch = threading.Event(), first._joined.watch

    def fails() -> list[Report]:
        try:
            with first.delegated_to(Replay(first)):
                leaving.set()
                assert watch.broken.wait(120)
                raise ConnectionError('a holder is lost')
        except ConnectionError as error:
            first.leave(str(error))
            return first.meet(lambda: survivor(first.origin))

    failed = job.threads.submit(fails)
    assert leaving.wait(120)
    end_round(job.store, 0, 'another rank died')
    while not failed.done():
        for future in [job.move_on(member) for member in members[1:]]:
            future.result()
        wait_until(lambda: failed.done() or members[1].broken)
    assert len(failed.result()) == WORLD
